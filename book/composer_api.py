"""API pages, read from the package's source without importing it: signatures, shapes, docstrings, errors.

One page per part of the book, a section per module that has an `__all__`, written to `book/api/`
(ignored by git) before Sphinx looks for pages.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import yaml
from composer_notebooks import headline, module_of

PACKAGE = "composer_nb"
FOLDER = "book/api"
OTHER = "Other"
SPECIAL = re.compile(r"(`+[^`]*`+)|([\\*{}\[\]<>#|$~&@]|(?<!\w)_|_(?!\w))")
VALUE_LENGTH = 70
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A source file of the package: dotted name, public names in order, their definitions, where names come
    from."""

    name: str
    lines: list[str]
    tree: ast.Module
    public: list[str]

    @property
    def subtitle(self) -> str:
        return " ".join((ast.get_docstring(self.tree) or "").split("\n\n")[0].split())

    @cached_property
    def definitions(self) -> dict[str, ast.stmt]:
        """What the module defines at its top level, by name: of two assignments the first, of two functions
        the last."""
        found: dict[str, ast.stmt] = {}
        for node in _top(self.tree):
            if isinstance(node, (Function, ast.ClassDef)):
                found[node.name] = node
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
                found |= {name: node for name in names if name not in found}
        return found

    def origin(self, name: str) -> str | None:
        """The module that an imported name comes from."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
                base = self.name.split(".")
                parents = base if self.is_package else base[:-1]
                kept = parents[: len(parents) - (node.level - 1)] if node.level else []
                return ".".join([*kept, *([node.module] if node.module else [])])
        return None

    @property
    def is_package(self) -> bool:
        return self.lines[:1] == ["#package"]

    def comment(self, line: int) -> str:
        """The trailing comment of a line (counted from 1)."""
        match = re.search(r"\s#\s(?!type:|noqa)(.+)$", self.lines[line - 1 + self.is_package])
        return match[1].strip() if match else ""


def _top(tree: ast.Module) -> list[ast.stmt]:
    """Top-level statements, those under `if` and `try` included."""
    found = list(tree.body)
    for node in tree.body:
        if isinstance(node, (ast.If, ast.Try)):
            found += [*node.body, *node.orelse, *(s for h in getattr(node, "handlers", []) for s in h.body)]
    return found


def _public_names(tree: ast.Module) -> list[str]:
    """The literal strings in `__all__`, however it is put together; underscored ones left out."""
    names: list[str] = []
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__" and node.value is not None:
            names += [
                n.value
                for n in ast.walk(node.value)
                if isinstance(n, ast.Constant) and isinstance(n.value, str)
            ]
    return list(dict.fromkeys(name for name in names if not name.startswith("_")))


def read_package(root: Path) -> list[Module]:
    """All modules with an `__all__`, by dotted name."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        if public := _public_names(tree):
            inside = path.relative_to(root).with_suffix("")
            package = path.name == "__init__.py"
            name = ".".join((inside.parent if package else inside).parts)
            found.append(Module(name, ["#package"] * package + text.splitlines(), tree, public))
    return sorted(found, key=lambda module: module.name)


# --- one definition as MyST ---------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """Plain text for Markdown: what it would take for markup is escaped, code spans are left alone."""
    return SPECIAL.sub(lambda m: m[1] or f"&#{ord(m[2])};", text)


def prose(docstring: str | None) -> str:
    """A docstring as paragraphs and lists."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(docstring or ""))
    done = []
    for block in blocks:
        items = re.split(r"\n(?=\s*[-*] )", block)
        listed = all(re.match(r"\s*[-*] ", item) for item in items)
        texts = [
            escaped(" ".join(re.sub(r"^\s*[-*] ", "", item).split() if listed else item.split()))
            for item in items
        ]
        done.append("\n".join(f"- {text}" for text in texts) if listed else "\n".join(texts))
    return "\n\n".join(done)


def errors(node: ast.AST) -> list[str]:
    """What a function raises by itself: exception and message, as the source has them."""
    found = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Raise) and isinstance(inner.exc, ast.Call):
            kind = ast.unparse(inner.exc.func).split(".")[-1]
            text = ast.unparse(inner.exc.args[0]) if inner.exc.args else ""
            message = re.sub(r"^f?(['\"])(.*)\1$", r"\2", text, flags=re.DOTALL)
            if re.match(r"[A-Z]", kind):
                found.append(
                    f"`{kind}`" + (f": {escaped(' '.join(message.split()))}" if message != text else "")
                )
    return list(dict.fromkeys(found))


def signature(node: Function, drop_self: bool = False) -> str:
    args = node.args
    if drop_self and (args.posonlyargs or args.args):
        args = ast.arguments(**{field: getattr(args, field) for field in ast.arguments._fields})
        args.posonlyargs, args.args = (
            (args.posonlyargs[1:], args.args) if args.posonlyargs else ([], args.args[1:])
        )
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(args)}){returns}"


def decorators(node: ast.AST) -> set[str]:
    return {ast.unparse(d.func if isinstance(d, ast.Call) else d).split(".")[-1] for d in node.decorator_list}


def body_of(node: ast.AST) -> str:
    """Docstring and errors of a function."""
    raised = errors(node)
    listed = "\n\n**Raises**\n\n" + "\n".join(f"- {line}" for line in raised) if raised else ""
    return prose(ast.get_docstring(node)) + listed


def block(fence: str, kind: str, head: str, module: str, body: str) -> str:
    return f"{fence}{{py:{kind}}} {head}\n:module: {module}\n\n{body}\n{fence}\n"


def fields_of(module: Module, node: ast.ClassDef) -> list[tuple[str, str, str, str]]:
    """Annotated attributes of a class body: name, type, default, trailing comment."""
    return [
        (
            item.target.id,
            ast.unparse(item.annotation),
            ast.unparse(item.value) if item.value else "",
            module.comment(item.end_lineno),
        )
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_"
    ]


def class_block(module: Module, node: ast.ClassDef) -> str:
    methods = [m for m in node.body if isinstance(m, Function)]
    made = next((m for m in methods if m.name == "__init__"), None)
    fields = fields_of(module, node)
    head = node.name + (signature(made, drop_self=True).split(" -> ")[0] if made else "")
    bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases)
    parts = [prose(ast.get_docstring(node)), f"Extends {bases}." if bases else ""]
    if fields:
        cell = [
            " | ".join(f"`` {text} ``".replace("|", r"\|") if text else "" for text in row[:3])
            + f" | {escaped(row[3])}"
            for row in fields
        ]
        parts.append(
            "\n".join(["| field | type | default | |", "|---|---|---|---|", *(f"| {row} |" for row in cell)])
        )
    if made and (own := body_of(made)):
        parts.append(own)
    for method in methods:
        if method.name.startswith("_") and method.name != "__call__" or "setter" in decorators(method):
            continue
        kinds = decorators(method)
        kind = "property" if {"property", "cached_property"} & kinds else "method"
        head_of = f"{node.name}.{method.name}"
        if kind == "property":
            type_line = f":type: {ast.unparse(method.returns)}\n" if method.returns else ""
            parts.append(
                f":::{{py:property}} {head_of}\n:module: {module.name}\n{type_line}\n{body_of(method)}\n:::\n"
            )
        else:
            drop = "staticmethod" not in kinds
            parts.append(
                block(":::", kind, head_of + signature(method, drop_self=drop), module.name, body_of(method))
            )
    return block("::::", "class", head, module.name, "\n\n".join(part for part in parts if part))


def data_block(module: Module, name: str, node: ast.Assign | ast.AnnAssign) -> str:
    value = " ".join(ast.unparse(node.value).split()) if node.value else ""
    value = value if len(value) <= VALUE_LENGTH else value[:VALUE_LENGTH] + " …"
    said = escaped(module.comment(node.end_lineno))
    return block("::::", "data", name, module.name, f"`` {value} ``\n\n{said}")


def definition_block(module: Module, name: str) -> str:
    node = module.definitions.get(name)
    if isinstance(node, ast.ClassDef):
        return class_block(module, node)
    if isinstance(node, Function):
        return block("::::", "function", name + signature(node), module.name, body_of(node))
    if node is not None:
        return data_block(module, name, node)
    origin = module.origin(name)
    where = f"{{py:obj}}`{origin}.{name}`" if origin and origin.startswith(PACKAGE) else f"`{origin}`"
    return f"`{name}`: from {where}.\n"


# --- pages --------------------------------------------------------------------------------------------------


@cache
def chapter_of_modules(root: Path) -> dict[str, tuple[str, str]]:
    """For each module of the package, the chapter that exports it: its page and its title."""
    found = {}
    for path in sorted((root / "nbs").rglob("*.ipynb")):
        if not any(part.startswith(".") for part in path.relative_to(root).parts):
            notebook = json.loads(path.read_text())
            if name := module_of(notebook):
                found[f"{PACKAGE}.{name}"] = (
                    path.relative_to(root).with_suffix("").as_posix(),
                    headline(notebook),
                )
    return found


def shelves(root: Path, modules: list[Module]) -> dict[str, list[Module]]:
    """Modules by the part of the book whose chapters export them, in reading order; `Other` has no
    chapter."""
    parts = yaml.safe_load((root / "_toc.yml").read_text()).get("parts", [])
    files = {part.get("caption", ""): re.findall(r"'file': '([^']+)'", str(part)) for part in parts}
    place = {page: (caption, number) for caption, pages in files.items() for number, page in enumerate(pages)}
    chapters, found = chapter_of_modules(root), {caption: [] for caption in [*files, OTHER]}
    for module in modules:
        page = chapters.get(module.name, ("", ""))[0]
        found[place.get(page, (OTHER, 0))[0]].append((place.get(page, (OTHER, 0))[1], module.name, module))
    return {caption: [module for *_, module in sorted(row)] for caption, row in found.items() if row}


def slug(caption: str) -> str:
    return re.sub(r"\W+", "_", caption.lower())


def module_section(module: Module, chapters: dict[str, tuple[str, str]]) -> str:
    chapter = chapters.get(module.name)
    written = (
        f"Written and explained in the chapter [{escaped(chapter[1])}](/{chapter[0]}.ipynb)."
        if chapter
        else ""
    )
    head = [
        f"({target(module.name)})=\n## {escaped(module.name)}",
        escaped(module.subtitle),
        f"```{{py:module}} {module.name}\n```",
        written,
    ]
    return (
        "\n\n".join([*(part for part in head if part), *(definition_block(module, n) for n in module.public)])
        + "\n"
    )


def target(name: str) -> str:
    """The label of a module's section."""
    return f"api-{name.replace('.', '-')}"


def shelf_page(caption: str, modules: list[Module], chapters: dict[str, tuple[str, str]]) -> str:
    names = sum(len(module.public) for module in modules)
    return "\n".join(
        [
            f"# API: {caption}",
            "",
            f"> Signatures, shapes and errors of the {names} public names that the "
            f"chapters of this part export.",
            "",
            *(module_section(module, chapters) for module in modules),
        ]
    )


def index_page(shelved: dict[str, list[Module]]) -> str:
    rows = [
        f"| [`{m.name.removeprefix(PACKAGE + '.')}`](#{target(m.name)}) | "
        f"{', '.join(f'`{name}`' for name in m.public)} |"
        for modules in shelved.values()
        for m in modules
    ]
    return "\n".join(
        [
            "# API",
            "",
            "> Every public name of `composer_nb`: signature, shapes, errors.",
            "",
            "<!-- roadmap -->",
            "",
            "Read from the source at build time. Shapes stand in the annotations: "
            '`Float[Tensor, "rows vocab"]` is a floating-point tensor of two axes of these names. '
            "*Raises* lists what a function itself raises, with the message; what it calls may raise more.",
            "",
            "| module | public names |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def write_pages(root: Path) -> dict[str, str]:
    """Bring `book/api/` up to date and return the label of each module's section; other files there are
    removed."""
    folder, modules, chapters = root / FOLDER, read_package(root), chapter_of_modules(root)
    folder.mkdir(parents=True, exist_ok=True)
    shelved = shelves(root, modules)
    wanted = {"index.md": index_page(shelved), ".gitignore": "*\n"}
    wanted |= {
        f"part_{slug(caption)}.md": shelf_page(caption, row, chapters) for caption, row in shelved.items()
    }
    for path in folder.iterdir():
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return {module.name: target(module.name) for module in modules}
