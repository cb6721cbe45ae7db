"""What goes wrong for a user: always one sentence."""


class FedremaError(Exception):
    """One sentence for the person at the keyboard; the command line prints it and exits with 2."""


class BadInput(FedremaError):
    """A setting, a file or a request that cannot be honoured: names it, its value, and what is valid."""


class Diverged(FedremaError):
    """Training produced a number that is not finite: names the round and the client."""
