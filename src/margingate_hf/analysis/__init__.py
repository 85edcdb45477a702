"""What is measured with a model: audits, replays, calibrations, and comparisons of outputs."""
