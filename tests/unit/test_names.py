"""Names mean one thing: the glossary is short, no word in it twice, and classes and modules keep to it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "floodmark"
GLOSSARY = (ROOT / "docs/glossary.md").read_text()
ENTRIES_MAX = 49

# Words that no name may have, whole or in part: the glossary has others for these ideas.
BANNED_WORDS = {"heal", "healer", "healing", "healed", "door", "doors", "upkeep", "keeper", "lookout", "upkept"}
# What cannot be the whole name of a module or class: a reader cannot guess what it is. `live_files` can be guessed.
BANNED_NAMES = {
    *("edges", "lines", "live", "needed", "drifted", "recording", "packed", "bodies", "relations", "problems"),
    *("footing", "claims", "families", "described", "declared", "words", "work", "shared", "serving", "brake"),
}


def parts_of(name: str) -> set[str]:
    """The words of a name: json_lines, JobLine."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def is_banned(name: str) -> bool:
    return bool(parts_of(name) & BANNED_WORDS) or name.lower() in BANNED_NAMES


def modules() -> dict[str, ast.Module]:
    return {
        path.relative_to(PACKAGE).with_suffix("").as_posix(): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def classes() -> dict[str, list[str]]:
    """Public classes at the top of modules, by name. What tests are shipped with is not part of the product's names."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not module.startswith("testing/"):
                found[node.name].append(module)
    return found


def test_the_glossary_is_short_and_has_each_word_once() -> None:
    entries = [line for line in GLOSSARY.splitlines() if line.startswith("| **")]
    assert 20 <= len(entries) <= ENTRIES_MAX
    words = re.findall(r"\*\*([^*]+)\*\*", GLOSSARY)
    assert sorted(words) == sorted(set(words))


def test_the_glossary_has_no_word_that_is_banned() -> None:
    assert [word for word in re.findall(r"\*\*([^*]+)\*\*", GLOSSARY) if is_banned(word)] == []


def test_no_module_is_named_by_a_banned_word() -> None:
    assert [module for module in modules() if is_banned(module.rsplit("/", 1)[-1])] == []


def test_no_class_is_named_by_a_banned_word() -> None:
    assert [name for name in classes() if is_banned(name)] == []


def test_a_class_name_means_one_thing() -> None:
    assert {name: where for name, where in classes().items() if len(where) > 1} == {}


def test_names_are_cut_into_words() -> None:
    assert parts_of("json_lines") == {"json", "lines"}
    assert parts_of("UpkeepSeen") == {"upkeep", "seen"}
    assert parts_of("LakeFileIO") == {"lake", "file", "io"}
    assert is_banned("DestinationKeeper")
    assert is_banned("live")
    assert not is_banned("live_files")
    assert not is_banned("Health")
