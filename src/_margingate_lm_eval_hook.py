"""
Makes `lm_eval --model margingate-hf` work on releases of lm-eval that do not look for plug-ins (0.4.10 to 0.4.13).

The wheel's `margingate_hf.pth` imports this module when Python starts. It imports nothing heavy and puts one finder on
`sys.meta_path`, which acts only when `lm_eval.models` is imported: once that module has run, the model's name is added
to lm-eval's registry, unless the registry reads entry points itself. `MARGINGATE_NO_LM_EVAL_HOOK=1` leaves it out.
"""

import os
import sys

MODULE = "lm_eval.models"
NAME = "margingate-hf"
TARGET = "margingate_hf.lm_eval.model:MarginGateLM"


def register():
    """Adds the model to lm-eval's registry, by name, so that it is imported when asked for; does nothing twice."""
    from lm_eval.api import registry

    known = registry.model_registry
    if NAME not in known and not hasattr(registry, "load_plugins"):
        known.register(NAME, target=TARGET)


class Finder:
    """Lets the import of `lm_eval.models` run as ever and registers the model behind it."""

    def __init__(self):
        self.looking = False

    def find_spec(self, name, path=None, target=None):
        """The spec the other finders give, with a loader that registers afterwards."""
        if name != MODULE or self.looking:
            return None
        from importlib.util import find_spec

        self.looking = True
        try:
            spec = find_spec(name)
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                register()

            spec.loader.exec_module = exec_module
        return spec


if os.environ.get("MARGINGATE_NO_LM_EVAL_HOOK") != "1":
    sys.meta_path.insert(0, Finder())
