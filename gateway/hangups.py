"""SIGHUP while nobody handles it: it would end the process, so it waits until somebody does."""

import signal


def hold() -> None:
    """Call it as early as can be. The kernel keeps one SIGHUP for the handler that comes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def let_through() -> None:
    """There is a handler now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
