"""`python -m tpuconv` is the command `tpuconv`."""

from tpuconv.cli import main

main()
