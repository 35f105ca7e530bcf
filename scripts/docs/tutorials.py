"""Tutorials: notebooks in Markdown, with outputs from a cache that is keyed by their code.

``docs/tutorials/outputs/NAME.ipynb`` holds the code cells of a tutorial with their outputs, as
``python scripts/docs/tutorials.py`` has executed them (`make docs-run`), and in its metadata the
packages that they used with a digest of their source. ``--changed`` executes the tutorials whose
code or packages have changed since. When the site is built, a
cache of jupyter-cache is filled with these notebooks, and MyST-NB takes the outputs from it. A
tutorial whose code was changed since has none there, which is an error; text may change. So a
translation, which has the same code, is shown with the same outputs.

The cache of jupyter-cache itself is a data base with times and absolute paths in it: it cannot be
compared, and changes whenever it is used. So it is made anew for each build, and the notebooks are
what is committed.
"""

import argparse
import hashlib
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from myst_nb.core.read import read_myst_markdown_notebook
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "tutorials"
TRANSLATED = ROOT / "docs" / "zh" / "tutorials"
OUTPUTS = FOLDER / "outputs"
PACKAGE = ROOT / "src" / "transformer_xl"
LONGEST = 180
"""Seconds of a processor that executing a tutorial may take."""
NOTE_PACKAGES = """
import atexit, os, sys

def note():
    names = {module.split(".")[1] for module in sys.modules if module.startswith("transformer_xl.")}
    with open(os.environ["TXL_USED_PACKAGES"], "a") as file:
        file.writelines(f"{name}\\n" for name in names)

atexit.register(note)
"""
"""The ``sitecustomize`` of each Python that a tutorial starts."""


def tutorials() -> list[Path]:
    """Return the files of the tutorials."""
    return sorted(path for path in FOLDER.glob("*.md") if path.read_text("utf-8")[:4] == "---\n")


def translated() -> list[Path]:
    """Return the files of tutorials in Chinese, which have the code and outputs of the others."""
    return sorted(TRANSLATED.glob("*.md"))


def read_tutorial(path: Path) -> Any:
    """Read a tutorial as a notebook without outputs."""
    return read_myst_markdown_notebook(path.read_text("utf-8"), path=path)


def sources(notebook: Any) -> list[str]:
    """Return the code of a notebook, cell by cell."""
    return [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]


def executed(path: Path) -> Any:
    """Return a tutorial as a notebook with its outputs.

    Raises:
        ValueError: There are no outputs of this code.
    """
    notebook, stored = read_tutorial(path), OUTPUTS / f"{path.stem}.ipynb"
    outputs = nbformat.read(stored, as_version=4) if stored.is_file() else None
    if outputs is None or sources(outputs) != sources(notebook):
        raise ValueError(
            f"{path.parent.name}/{path.name}: its code is not that of its outputs: after a change, "
            f"run `make docs-run`, or python scripts/docs/tutorials.py {path.stem}"
        )
    notebook["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    cells = (cell for cell in outputs["cells"] if cell["cell_type"] == "code")
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            own = next(cells)
            cell["outputs"], cell["execution_count"] = own["outputs"], own["execution_count"]
    return notebook


def digest(packages: Sequence[str]) -> str:
    """Return a digest of packages, of the modules beside them and of the shipped models."""
    found = hashlib.sha256()
    inside = (path for name in (*packages, "pretrained") for path in (PACKAGE / name).rglob("*"))
    for path in sorted([*PACKAGE.glob("*.py"), *inside]):
        if path.is_file() and path.suffix not in (".pyc", ".so"):
            found.update(f"{path.relative_to(PACKAGE)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def is_current(path: Path) -> bool:
    """Return whether the stored outputs are of the code of a tutorial and of today's packages."""
    try:
        executed(path)
    except ValueError:
        return False
    stored = nbformat.read(OUTPUTS / f"{path.stem}.ipynb", as_version=4)
    used = stored["metadata"].get("transformer_xl")
    return used is not None and digest(used["packages"]) == used["digest"]


def for_download(notebook: Any) -> Any:
    """Return a notebook that stands alone: without links to pages, and directives of the site."""
    alone: Any = nbformat.from_dict(notebook)
    about = notebook["metadata"]
    alone["metadata"] = {name: about[name] for name in ("kernelspec", "language_info")}
    for n, cell in enumerate(alone["cells"]):
        cell["id"], cell["metadata"] = f"cell-{n}", {}
        if cell["cell_type"] == "markdown":
            text = re.sub(r"^```\{raw\}.*?^```\n?", "", cell["source"], flags=re.M | re.S)
            text = re.sub(r"\{[\w:]+\}`~?([^`<]*?)( <[^`]*>)?`", r"\1", text)
            cell["source"] = re.sub(r"\[([^]]+)\]\((?!https?:)[^)]*\)", r"\1", text)
    alone["nbformat"], alone["nbformat_minor"] = 4, 5
    return alone


def execute(path: Path) -> tuple[float, float]:
    """Execute a tutorial in an empty folder, and store its outputs.

    Returns:
        The seconds it took, and the seconds of a processor.
    """
    from nbclient import NotebookClient

    notebook = read_tutorial(path)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as hooks:
        start, used = time.perf_counter(), _processor_seconds()
        (Path(hooks) / "sitecustomize.py").write_text(NOTE_PACKAGES)
        noted = Path(hooks) / "packages"
        os.environ["TXL_USED_PACKAGES"] = str(noted)
        # The commands of this environment are found, whatever the caller's PATH.
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # One thread: rounding, and so the numbers, depend on how many there are.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # And the package is that of this folder.
        os.environ["PYTHONPATH"] = f"{hooks}{os.pathsep}{ROOT / 'src'}"
        # Figures without the time at which they were made.
        os.environ |= {"MATPLOTLIBRC": str(Path(__file__).parent), "SOURCE_DATE_EPOCH": "0"}
        # Warnings that libraries give to their developers would name files of this machine.
        os.environ["PYTHONWARNINGS"] = "ignore"
        where = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=1200, resources=where)
        # A kernel that is killed on a busy machine, after 5 seconds, notes no packages.
        client.create_kernel_manager().shutdown_wait_time = 120
        client.execute()
        seconds = time.perf_counter() - start, _processor_seconds() - used
        names = {*noted.read_text().split()}
    packages = sorted(name for name in names if (PACKAGE / name / "__init__.py").is_file())
    stored = nbformat.v4.new_notebook()
    stored["metadata"] = {
        "kernelspec": notebook["metadata"]["kernelspec"],
        "transformer_xl": {"packages": packages, "digest": digest(packages)},
    }
    for n, cell in enumerate(x for x in notebook["cells"] if x["cell_type"] == "code"):
        # Numbers in place of the random names and the times of a run, which would change each time.
        own = nbformat.v4.new_code_cell(cell["source"], id=f"code-{n}")
        own["execution_count"] = cell["execution_count"]
        own["outputs"] = _kept(cell["outputs"], folder)
        stored["cells"].append(own)
    OUTPUTS.mkdir(exist_ok=True)
    nbformat.write(stored, OUTPUTS / f"{path.stem}.ipynb")
    return seconds


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


_ERASED = re.compile(r"\r(?!\n)|\x1b\[2K|\x1b\[1A")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def printed(text: str, folder: str = "") -> str:
    """Return what a terminal shows at the end: without progress bars, colours and folders.

    Args:
        text: What was written to the terminal.
        folder: A folder whose name is left out, too. Empty: none.
    """
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        parts = [_ESCAPE.sub("", part) for part in _ERASED.split(line)]
        kept = [part for part in parts if part and "\N{BOX DRAWINGS HEAVY HORIZONTAL}" not in part]
        lines += kept or ([""] if not any(parts) and len(parts) == 1 else [])
    shown = "\n".join(lines).replace(f"{ROOT}/", "")
    return shown.replace(f"{folder}/", "") if folder else shown


def _kept(outputs: Sequence[Any], folder: str) -> list[Any]:
    """Return outputs with texts joined, and without what depends on time and machine."""
    kept: list[Any] = []
    for output in outputs:
        before = kept[-1] if kept else {}
        if output["output_type"] == "stream" and before.get("name") == output["name"]:
            before["text"] += output["text"]
        else:
            kept.append(output)
    for output in kept:
        if output["output_type"] == "stream":
            output["text"] = printed(output["text"], folder)
        # A picture has a description on the page, and needs no name of the object.
        if len(output.get("data", ())) > 1:
            output["data"].pop("text/plain", None)
    return kept


def _fill_cache(app: Sphinx, config: Any) -> None:
    """Fill the cache that MyST-NB reads, and write the notebooks that can be downloaded."""
    folder = Path(config.nb_execution_cache_path)
    cache, problems = get_cache(folder), []
    cache.clear_cache()
    for path in [*tutorials(), *translated()]:
        try:
            notebook = executed(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        cache.cache_notebook_bundle(
            CacheBundleIn(nb=notebook, uri=str(path)), check_validity=False, overwrite=True
        )
        name = f"{path.stem}{'.zh-CN' * (path.parent == TRANSLATED)}.ipynb"
        download = Path(app.srcdir) / "generated" / "notebooks" / name
        download.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(for_download(notebook), download)
    if problems:
        raise ExtensionError("\n".join(problems))


def _note_outputs(app: Sphinx, docname: str, content: list[str]) -> None:
    """Have a tutorial read again when its outputs have changed."""
    stored = OUTPUTS / f"{Path(docname).name}.ipynb"
    if "tutorials/" in docname and stored.is_file():
        app.env.note_dependency(str(stored))


def setup(app: Sphinx) -> dict[str, Any]:
    """Fill the cache before MyST-NB opens it."""
    app.connect("config-inited", _fill_cache)
    app.connect("source-read", _note_outputs)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def main() -> int:
    """Execute tutorials, one on each core; return 1 if one took too much of a processor."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", help="which; none: all")
    parser.add_argument(
        "--changed", action="store_true", help="only those whose code or packages have changed"
    )
    given = parser.parse_args()
    chosen = [path for path in tutorials() if not given.names or path.stem in given.names]
    if unknown := {*given.names} - {path.stem for path in chosen}:
        parser.error(f"there are no tutorials {sorted(unknown)}")
    if given.changed:
        chosen = [path for path in chosen if not is_current(path)]
        print(f"changed: {', '.join(path.stem for path in chosen) or 'none'}", flush=True)
    slow = []
    # A process for each, in which nothing but its kernel is started.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context, max_tasks_per_child=1) as pool:
        for path, (seconds, used) in zip(chosen, pool.map(execute, chosen), strict=True):
            print(f"{path.stem}: {seconds:.0f} seconds, {used:.0f} of a processor", flush=True)
            # How long it takes depends on what else the machine does, too.
            slow += [path.stem] * (used > LONGEST)
    if slow:
        print(f"more than {LONGEST} seconds: {', '.join(slow)}", file=sys.stderr)
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
