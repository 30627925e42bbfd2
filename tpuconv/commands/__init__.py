"""The commands: each parses its options, calls `tpuconv.api` and draws the result. Only this package prints."""
