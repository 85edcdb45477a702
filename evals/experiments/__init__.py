"""One module an experiment: `arguments(parser)`, `measure(options) -> record`, `report(record) -> Markdown`."""
