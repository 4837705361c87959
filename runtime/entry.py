"""Where krun begins: what it needs is loaded only once an interrupt is safe."""

import sys

from layout.early_exit import leave_on_interrupt

# The main thread waits for reader threads; with the default 5 ms it would learn of a finished read 5 ms late whenever it is at work itself.
SWITCH_INTERVAL_S = 2e-4


def main() -> None:
    """Run krun."""
    leave_on_interrupt("krun")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    from runtime.cli import main as run

    run()
