"""Datasets that flags name by an address: the one place where that becomes a folder."""

from pathlib import Path

from fabric_llm.mirror import address

_fetched: dict[tuple[str, bool], Path] = {}


def folder(given: str, whole: bool = True) -> Path:
    """The folder `given`, or that of the dataset which the address `given` names, in the user's
    cache. A process reads one version of it, whatever comes there meanwhile.

    whole: see `fetch.dataset`, of which this raises the Fault.
    """
    if not address.is_address(given):
        return Path(given)
    if (given, whole) not in _fetched:
        # A feature that is off isn't imported.
        from fabric_llm.mirror import fetch

        address.require(given, "The address", is_folder=True)
        _fetched[given, whole] = fetch.dataset(given, whole)
    return _fetched[given, whole]


def versions() -> dict[str, str]:
    """{address: which data this process has found there}: the same on all machines."""
    return {given: there.parent.name for (given, whole), there in _fetched.items() if whole}
