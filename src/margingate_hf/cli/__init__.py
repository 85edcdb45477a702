"""The `margingate` command."""
