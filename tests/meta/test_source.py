"""Rules of the source code that no linter checks: docstrings, annotations, what may not appear."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator

from tests.meta.source import Function, functions, modules, nodes, public_definitions, text_of, top_level_imports

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
# What reads pickles, or code, by another name. Of these, only training reads its own files, and without objects.
FORBIDDEN_METHODS = {"torch.load", "torch.jit.load", "torch.hub.load", "yaml.unsafe_load", "yaml.full_load"}
FORBIDDEN_METHODS |= {"np.load", "numpy.load", "pandas.read_pickle", "os.system", "os.popen"}
METHOD_NAMES = {dotted.rpartition(".")[2] for dotted in FORBIDDEN_METHODS}
READERS = ("train/checkpoint.py", "checkpoint/pickled.py")  # the latter only by --load-format pt
# Where torch tensors live; everything else runs without PyTorch.
TORCH_ROOMS = ("kernels/reference", "kernels/gpu", "train", "distributed", "multimodal")
# Compiled by Numba, which infers the types.
NUMBA_ROOM = "kernels/cpu"
# Broad handlers are for the boundaries of processes, threads and tasks; each says so beside it.
BROAD = {"Exception", "BaseException"}

# Quire has no variables of its own; these hand down, read or set those of others.
ENVIRONMENT_READERS = {
    "child_process.py": "PYTHONPATH, for the child",
    "cli/serve.py": "the key of vLLM, and warnings of its other variables",
    "cli/collect_env.py": "what a report of a problem should say",
    "frontend/tokenizer_check.py": "XDG_CACHE_HOME, as all programs do",
    "frontend/worker_process.py": "numbers of threads, which have no other switch, for the child",
    "supervisor/systemd.py": "how systemd says that it listens",
}


def offences(rule: Callable[[str, ast.Module], Iterator[str]], skip: tuple[str, ...] = ()) -> list[str]:
    """Apply a rule to every module outside the rooms in `skip`; return "file: what is wrong"."""
    return [
        f"{name}: {offence}"
        for name, tree in modules().items()
        if not name.startswith(skip or ("-",))
        for offence in rule(name, tree)
    ]


def test_the_package_is_found():
    assert len(modules()) > 40


def base_names(tree: ast.Module) -> set[str]:
    """Return the names of the classes that classes of a module inherit from."""
    classes = [node for node in nodes(tree) if isinstance(node, ast.ClassDef)]
    return {base for node in classes for base in bases_of(node)}


def bases_of(node: ast.ClassDef) -> set[str]:
    """Return the names of the classes that a class inherits from."""
    return {ast.unparse(base).partition("[")[0] for base in node.bases}


def test_modules_and_public_definitions_say_what_they_are_for():
    """What a method of a protocol, or of a base class, is for is said there and not again where it is implemented."""
    bases = set().union(*(base_names(tree) for tree in modules().values()))
    described = {
        member.name
        for tree in modules().values()
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef) and (node.name in bases or bases_of(node) & {"Protocol", "ABC"})
        for member in node.body
        if isinstance(member, Function) and ast.get_docstring(member)
    }

    def rule(name: str, tree: ast.Module) -> Iterator[str]:
        if not ast.get_docstring(tree):
            yield "no module docstring"
        for dotted, node in public_definitions(tree):
            implements = "." in dotted and node.name in described
            if not implements and not ast.get_docstring(node):
                yield dotted

    assert offences(rule) == []


def test_functions_are_annotated():
    def rule(name: str, tree: ast.Module) -> Iterator[str]:
        for function in functions(tree):
            if any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list):
                continue  # compiled by Triton, which infers the types
            arguments = function.args
            for item in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                if item.annotation is None and item.arg not in ("self", "cls", "__self"):
                    yield f"{function.name}({item.arg})"
            if function.returns is None:
                yield f"{function.name}() -> ?"

    assert offences(rule, skip=(NUMBA_ROOM,)) == []


def test_nothing_executes_data():
    def rule(name: str, tree: ast.Module) -> Iterator[str]:
        for node in nodes(tree):
            found = set()
            if isinstance(node, ast.Import):
                found = {item.name.partition(".")[0] for item in node.names} & FORBIDDEN_MODULES
            elif isinstance(node, ast.ImportFrom):
                found = {(node.module or "").partition(".")[0]} & FORBIDDEN_MODULES
                if [item.name for item in node.names] == ["UnpicklingError"]:
                    found = set()
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found = {node.func.id} & FORBIDDEN_CALLS
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                allowed = name in READERS and "weights_only=True" in ast.unparse(node)
                if node.func.attr in METHOD_NAMES and not allowed:
                    found = {ast.unparse(node.func)} & FORBIDDEN_METHODS
            yield from (f"line {getattr(node, 'lineno', 0)}: {word}" for word in found)

    assert offences(rule) == []


def test_code_of_models_is_never_run():
    def rule(name: str, tree: ast.Module) -> Iterator[str]:
        for node in nodes(tree):
            if not isinstance(node, ast.keyword) or node.arg not in ("trust_remote_code", "shell", "allow_pickle"):
                continue
            if not isinstance(node.value, ast.Constant) or node.value.value is not False:
                yield f"line {node.value.lineno}: {node.arg}"

    assert offences(rule) == []


def test_nothing_is_left_unfinished():
    def rule(name: str, tree: ast.Module) -> Iterator[str]:
        yield from re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b|raise NotImplementedError", text_of(name))

    assert offences(rule) == []


def test_comments_are_ascii():
    def rule(name: str, tree: ast.Module) -> Iterator[str]:
        if text_of(name).isascii():
            return
        for token in tokenize.generate_tokens(io.StringIO(text_of(name)).readline):
            if token.type == tokenize.COMMENT and not token.string.isascii():
                yield f"line {token.start[0]}"

    assert offences(rule) == []


def test_torch_is_imported_only_where_it_lives():
    def rule(name: str, tree: ast.Module) -> Iterator[str]:
        roots = {module.partition(".")[0] for module in top_level_imports(tree)}
        yield from roots & {"torch", "transformers", "triton"}

    assert offences(rule, skip=TORCH_ROOMS) == []


def test_broad_handlers_stand_at_boundaries_and_say_so():
    def rule(name: str, tree: ast.Module) -> Iterator[str]:
        lines = text_of(name).splitlines()
        for node in nodes(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = {item.id for item in ast.walk(node.type) if isinstance(item, ast.Name)} if node.type else BROAD
            reraised = isinstance(node.body[-1], ast.Raise)
            if caught & BROAD and not reraised and "boundary" not in lines[node.lineno - 1]:
                yield f"line {node.lineno}: a broad except without a reason"

    assert offences(rule) == []


def test_environment_variables_are_not_options():
    def rule(name: str, tree: ast.Module) -> Iterator[str]:
        for node in nodes(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                yield f"line {node.lineno}"

    assert offences(rule, skip=tuple(ENVIRONMENT_READERS)) == []
