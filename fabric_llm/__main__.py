"""`python -m fabric_llm`: the commands of this package, each with what the first sentence of its
module says."""

import ast
import re
import sys
from pathlib import Path
from typing import Optional

from fabric_llm.base.command_line import fail
from fabric_llm.base.names import nearest

HERE = Path(__file__).parent
SCRIPTS = "prepare_data.py, plan.py, train.py and export_hf.py are started from the checkout."


def commands() -> dict[str, tuple[str, str]]:
    """{name: (how it is called, what it does)} of the modules that `python -m` starts."""
    found = {}
    # A file or a folder at this level is a command. Folders without __main__.py are parts of these.
    for path in (*HERE.glob("[a-z]*.py"), *HERE.glob("[a-z]*/__main__.py")):
        name = path.parent.name if path.stem == "__main__" else path.stem
        # The docstring is read from the source, since importing a command may import torch.
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        # It begins with the call in backquotes, then says what the command does.
        call, does = re.match(r"`(.*?)`:? (.*?\.)(\s|$)", " ".join(text.split())).groups()[:2]
        found[name] = call, does
    return dict(sorted(found.items()))


def main(argv: Optional[list[str]] = None) -> None:
    """Print them. Raises SystemExit for any argument but --help."""
    known = commands()
    # A command goes behind a dot, but people write it as an argument.
    for word in sys.argv[1:] if argv is None else argv:
        if word not in ("-h", "--help"):
            close = [word] if word in known else nearest(word, known)
            meant = "python -m fabric_llm lists its commands."
            if close:
                meant = f"take python -m fabric_llm.{close[0]}."
            fail("fabric_llm", f"it takes no {word!r}: {meant}")
    for call, does in known.values():
        print(f"{call}\n    {does}")
    print(f"\n{SCRIPTS} --help of each says more.")


if __name__ == "__main__":
    main()
