"""These tests run in a process of their own: Triton's interpreter must be chosen before a kernel is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
