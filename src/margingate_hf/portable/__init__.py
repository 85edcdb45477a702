"""Portable arithmetic: integers and single IEEE operations in a written order, the same bits on every processor."""
