"""`--branch`: the branch that a command reads or writes. The same words for all of them."""

from __future__ import annotations

from typing import Annotated

import typer

OnBranch = Annotated[str, typer.Option("--branch", help="The branch that is meant.")]
