"""What every test relies on, however the suite was started."""

from __future__ import annotations

import signal

# A shell without job control starts background commands with SIGINT ignored, and children inherit that; the tests of
# interrupts need Python's own handler. Children get the default again, for an exec resets what is handled.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
