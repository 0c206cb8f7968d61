"""`python -m lorafleet.cli` is `lorafleet`."""

from lorafleet.cli.app import main

main()
