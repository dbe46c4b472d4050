"""The core: the part of Jinja that chat templates on the hub use, whose cost is linear in its input.

Whether a template stays within it is decided once, from its syntax tree (`is_core`). Such a template runs in the front,
in a `CoreEnvironment`, which counts what loops, texts and comparisons cost. What is hard to count is not in the core:
keyword arguments of methods, texts as formats, long texts looked for in lists. What the tree cannot show (of which type
a value is, how often a loop goes round) is seen when it happens: `BeyondCoreError` ends the rendering, and it is done
again in a worker process, as are all renderings of all other templates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from types import NoneType
from typing import Any

from jinja2 import Environment, Template, Undefined, nodes, pass_context
from jinja2.runtime import Context, Macro, str_join
from jinja2.visitor import NodeTransformer

from quire.frontend.chat_bounds import ITEM_CHARS, BeyondCoreError, Budget
from quire.frontend.chat_sandbox import ChatEnvironment, Function, compile_template, render_bounded, variables_read

MAX_SOURCE = 2**16
MAX_NODES = 2**13
MAX_TREE_DEPTH = 100
MAX_INDENT = 8
LINE_CHARS = 256  # of an item of JSON on a line of its own, about

COUNTED, JOINED, MADE, READ, WEIGHED = "_counted", "_joined", "_made", "_read", "_weighed"
NEEDLE, CONTAINER = "_needle", "_container"

NODES = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.AssignBlock),
    *(nodes.Macro, nodes.With, nodes.Scope, nodes.Break, nodes.Continue),
    *(nodes.Name, nodes.NSRef, nodes.Const, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Keyword),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Call, nodes.Filter, nodes.Test, nodes.CondExpr),
    *(nodes.And, nodes.Or, nodes.Not, nodes.Compare, nodes.Operand, nodes.Concat),
    *(nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Neg, nodes.Pos),
)
NO_NAMES = frozenset({"caller", "varargs", "kwargs", "self"})
JINJAS_OWN = frozenset({"_loop_vars", "_block_vars"})  # arguments that it adds to calls, and takes away again
PLAIN_KEYS = (str, int, float, NoneType, Undefined)
FUNCTIONS = frozenset({"raise_exception", "strftime_now", "range", "dict", "namespace"})
METHODS = frozenset(
    {
        *("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition", "replace", "join"),
        *("startswith", "endswith", "removeprefix", "removesuffix", "find", "rfind", "count"),
        *("upper", "lower", "title", "capitalize"),
        *("isdigit", "isalpha", "isalnum", "isnumeric", "isspace", "isupper", "islower"),
        *("items", "keys", "values", "get"),
        *("append", "extend", "insert", "pop", "update"),  # which the sandbox refuses
    }
)
# Python compares all characters with all others: to search from the end, and to strip.
PRODUCTS = frozenset({"rsplit", "rpartition", "rfind", "strip", "lstrip", "rstrip"})
# Filters whose arguments may be anything, and those whose arguments must be constant.
FILTERS = frozenset(
    {
        *("trim", "lower", "upper", "capitalize", "string", "safe", "replace", "join"),
        *("length", "count", "items", "list", "first", "last", "reverse", "default", "d", "abs"),
    }
)
LAZY_FILTERS = ("map", "select", "reject", "selectattr", "rejectattr")
CONSTANT_FILTERS = frozenset({"tojson", "dictsort", "int", "float", *LAZY_FILTERS})
MAPPED = frozenset({"trim", "string", "lower", "upper", "capitalize", "length", "count", "tojson"})
TESTS = frozenset(
    {
        *("defined", "undefined", "none", "true", "false", "boolean", "string", "mapping", "iterable", "sequence"),
        *("number", "integer", "float"),  # not odd and even, for which a text is a format
        *("sameas", "eq", "equalto", "==", "ne", "!=", "in"),
    }
)


def is_core(source: str, tree: nodes.Template) -> bool:
    """Whether a template, parsed by `parse_template`, uses nothing but the core."""
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    left = MAX_NODES

    def within(node: nodes.Node, depth: int) -> bool:
        nonlocal left
        left -= 1
        return (
            left >= 0
            and depth < MAX_TREE_DEPTH
            and isinstance(node, NODES)
            and _allowed(node, macros)
            and all(within(child, depth + 1) for child in node.iter_child_nodes())
        )

    return len(source) <= MAX_SOURCE and within(tree, 0)


def _allowed(node: nodes.Node, macros: set[str]) -> bool:
    """Whether the core has a node like this; its children are looked at elsewhere."""
    match node:
        case nodes.For():
            return not node.recursive
        case nodes.AssignBlock():
            return node.filter is None
        case nodes.Name():
            return node.name not in NO_NAMES
        case nodes.Getattr():
            return not node.attr.startswith("_")
        case nodes.Dict():
            return all(isinstance(pair.key, nodes.Const) and isinstance(pair.key.value, str) for pair in node.items)
        case nodes.Call():
            return node.dyn_args is None and node.dyn_kwargs is None and _callable(node, macros)
        case nodes.Filter():
            return node.node is not None and node.dyn_args is None and node.dyn_kwargs is None and _filter(node)
        case nodes.Test():
            return node.name in TESTS and not _dynamic(node) and all(map(_constant, node.args))
        case nodes.Compare():
            return len(node.ops) == 1 or not any(operand.op in ("in", "notin") for operand in node.ops)
    return True


def _dynamic(node: nodes.Test | nodes.Filter) -> bool:
    """Whether a test or filter has arguments by name, or as many as a list has."""
    return bool(node.kwargs) or node.dyn_args is not None or node.dyn_kwargs is not None


def _callable(node: nodes.Call, macros: set[str]) -> bool:
    if isinstance(node.node, nodes.Name):
        return node.node.name in macros or node.node.name in FUNCTIONS
    return isinstance(node.node, nodes.Getattr) and node.node.attr in METHODS and not node.kwargs


def _filter(node: nodes.Filter) -> bool:
    if node.name in FILTERS:
        return (not node.kwargs or node.name in ("default", "d")) and (node.name != "join" or len(node.args) <= 1)
    if node.name not in CONSTANT_FILTERS or not all(map(_constant, (*node.args, *node.kwargs))):
        return False
    values = [item.value for item in node.args if isinstance(item, nodes.Const)]
    names = {item.key for item in node.kwargs}
    if node.name == "map":
        return (
            names <= {"attribute", "default"} if not values else len(values) == 1 and values[0] in MAPPED and not names
        )
    if node.name in ("int", "float"):
        return len(node.args) + len(names) <= 1 and names <= {"default"}  # not the base
    if node.name == "tojson":
        return not node.args and all(map(_narrow, node.kwargs))
    if names:
        return node.name == "dictsort"
    if node.name in ("select", "reject"):
        return not values or values[0] in TESTS
    if node.name in ("selectattr", "rejectattr"):
        return len(values) == 1 or (len(values) > 1 and values[1] in TESTS)
    return True


def _narrow(item: nodes.Node) -> bool:
    """Whether an argument of `tojson` makes its text not much longer than ordinary JSON."""
    assert isinstance(item, nodes.Keyword)
    if item.key == "indent":
        return isinstance(item.value, nodes.Const) and item.value.value in (None, *range(MAX_INDENT + 1))
    if item.key == "separators":
        texts = [part.value for part in item.value.find_all(nodes.Const)]
        return all(isinstance(text, str) and len(text) <= MAX_INDENT for text in texts)
    return item.key in ("ensure_ascii", "sort_keys")


def _constant(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Keyword):
        return _constant(node.value)
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)


class _Metering(NodeTransformer):
    """Puts counters where the sandbox has no hooks."""

    def __init__(self) -> None:
        self._buffered = 0  # how many macros and blocks are around, the text of which is put together at their end

    def _through(self, name: str, node: nodes.Node) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Count the rounds."""
        self.generic_visit(node)
        node.iter = self._through(COUNTED, node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Price the text before it is made."""
        self.generic_visit(node)
        return self._through(JOINED, nodes.Tuple(node.nodes, "load", lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Weigh what is compared, unless one side is constant: then it is soon known to differ."""
        self.generic_visit(node)
        if node.ops[0].op in ("in", "notin"):
            node.expr = self._through(NEEDLE, node.expr)
            node.ops[0].expr = self._through(CONTAINER, node.ops[0].expr)
            return node
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if sum(_constant(side) for side in sides) < len(sides) - 1:
            node.expr = self._through(WEIGHED, node.expr)
            for operand in node.ops:
                operand.expr = self._through(WEIGHED, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Pay for slices."""
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = self._through(READ, node.node)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.AssignBlock) -> nodes.Node:
        """Price what is written within: the text is put together without being looked at."""
        self._buffered += 1
        self.generic_visit(node)
        self._buffered -= 1
        return node

    visit_AssignBlock = visit_Macro

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        """Price what is constant; `finalize` sees the rest."""
        self.generic_visit(node)
        if self._buffered:
            node.nodes = [self._made(child) for child in node.nodes]
        return node

    def _made(self, node: nodes.Expr) -> nodes.Expr:
        if isinstance(node, nodes.TemplateData):
            return self._through(MADE, nodes.Const(node.data, lineno=node.lineno))
        return self._through(MADE, node)


class CoreEnvironment(ChatEnvironment):
    """The sandbox, with a budget, for templates of the core."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%"])

    def __init__(self) -> None:
        self.budget = Budget()
        super().__init__(finalize=self.budget.weigh)  # of all that is printed
        budget = self.budget
        for name, price in {
            COUNTED: budget.counted,
            JOINED: _joined(budget),
            MADE: lambda value: value,
            READ: budget.read,
            WEIGHED: budget.weigh,
            NEEDLE: budget.needle,
            CONTAINER: _container(budget),
        }.items():
            self.filters[name] = _not_folded(price)
        for name in ("string", "lower", "upper", "capitalize", "safe", "dictsort"):
            self.filters[name] = _before(self.filters[name], budget.weigh)
        for name in LAZY_FILTERS:
            self.filters[name] = _counting(budget, self.filters[name])
        self.filters["trim"] = _trim(budget, self.filters["trim"])
        self.filters["tojson"] = _tojson(budget, self.filters["tojson"])
        self.filters["reverse"] = _reverse(budget, self.filters["reverse"])
        self.filters["list"] = lambda value: list(budget.counted(value))
        self.filters["join"] = _join(budget, self.filters["join"])
        self.filters["replace"] = _replace(budget, self.filters["replace"])
        self.globals["range"] = Function(self._range)
        self._functions = {id(self.globals[name]) for name in FUNCTIONS}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Metering().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox, at the price of a step."""
        self.budget.spend()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """As the sandbox, at the price of a step."""
        self.budget.spend()
        if not isinstance(argument, PLAIN_KEYS):  # to hash it may take long, or to say in an error what it is
            raise BeyondCoreError
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As the sandbox, at the price of a step; the odd names leave all others to the template."""
        __self.budget.spend()
        if isinstance(__obj, Function) and not kwargs.keys() <= JINJAS_OWN:
            raise BeyondCoreError
        if isinstance(__obj, Function) and id(__obj) not in __self._functions:
            __self._check_method(Function.inside(__obj), args)
        elif id(__obj) in __self._functions:
            for arg in args:
                __self.budget.weigh(arg)
        elif not isinstance(__obj, Macro):
            raise BeyondCoreError
        return super().call(__context, __obj, *args, **kwargs)

    def _check_method(self, method: Any, args: tuple[Any, ...]) -> None:
        owner: Any = getattr(method, "__self__", None)
        name = getattr(method, "__name__", "")
        if type(owner) not in (str, dict) or name not in METHODS:  # those of safe texts make longer ones
            raise BeyondCoreError
        self.budget.read(owner)
        if any(type(arg) is tuple for arg in args) and name != "join":
            raise BeyondCoreError
        if name == "replace":
            self.budget.check_replace(owner, *args[:2])
        elif name == "join" and args:
            self.budget.make(len(owner) * len(self.budget.weigh(args[0])))
        elif name in PRODUCTS:
            self.budget.check_product(owner, *args)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """As the sandbox, with a price."""
        self.budget.check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        self.budget.make(ITEM_CHARS * len(numbers))
        return numbers


def _not_folded(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a filter that is applied when the template runs, also to what is constant."""

    @pass_context
    def run(context: Context, value: Any) -> Any:
        return function(value)

    return run


def _before(function: Callable[..., Any], price: Callable[[Any], Any]) -> Callable[..., Any]:
    def priced(value: Any, *args: Any, **kwargs: Any) -> Any:
        price(value)
        return function(value, *args, **kwargs)

    return priced


def _counting(budget: Budget, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts what it reads, whenever that is."""

    @pass_context
    def counting(context: Context, value: Any, *args: Any, **options: Any) -> Any:
        return function(context, budget.counted(value) if value else value, *args, **options)

    return counting


def _trim(budget: Budget, function: Callable[..., Any]) -> Callable[..., Any]:
    def trim(value: Any, *chars: Any) -> Any:
        budget.weigh(value)
        if chars and not isinstance(value, str):
            raise BeyondCoreError
        budget.check_product(value, *chars)
        return function(value, *chars)

    return trim


def _tojson(budget: Budget, function: Callable[..., Any]) -> Callable[..., Any]:
    def tojson(value: Any, indent: int | None = None, **options: Any) -> Any:
        budget.weigh(value, ITEM_CHARS if indent is None else LINE_CHARS)
        return function(value, indent=indent, **options)

    return tojson


def _reverse(budget: Budget, function: Callable[..., Any]) -> Callable[..., Any]:
    def reverse(value: Any) -> Any:
        if isinstance(value, Iterator):
            value = list(budget.counted(value))
        return function(budget.read(value))

    return reverse


def _container(budget: Budget) -> Callable[[Any], Any]:
    def container(value: Any) -> Any:
        budget.spend()
        if not isinstance(value, str | list | tuple | dict | KeysView | Iterator | Undefined):
            raise BeyondCoreError
        return value if isinstance(value, dict) else budget.read(value)

    return container


def _joined(budget: Budget) -> Callable[[tuple[Any, ...]], str]:
    def joined(parts: tuple[Any, ...]) -> str:
        budget.weigh(parts)
        return str_join(parts)

    return joined


def _join(budget: Budget, function: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def join(context: Context, value: Iterable[Any], d: Any = "") -> Any:
        items = list(budget.counted(value))
        budget.weigh(items)
        budget.make(len(budget.weigh(d)) * len(items) if isinstance(d, str) else 0)
        return function(context.eval_ctx, items, d)

    return join


def _replace(budget: Budget, function: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def replace(context: Context, value: Any, old: Any, new: Any, *count: Any) -> Any:
        budget.check_replace(value, old, new)
        return function(context.eval_ctx, value, old, new, *count)

    return replace


def compile_core(source: str) -> tuple[Template, frozenset[str]]:
    """Return a template of the core, compiled, and the names that it reads. Raises `jinja2.TemplateSyntaxError`."""
    environment = CoreEnvironment()  # also for the names: to find them, Jinja computes what is constant
    return compile_template(source, environment), variables_read(environment.parse(source))


def render_core(template: Template, context: Mapping[str, Any], seconds: float) -> str:
    """Render a template from `compile_core`, in at most so many seconds of this thread's processor time.

    Raises:
        BeyondCoreError: it is to be rendered in a worker process. RequestError: as `render_bounded`.
    """
    environment: Environment = template.environment
    assert isinstance(environment, CoreEnvironment)
    environment.budget.refill(seconds)
    return render_bounded(template, context)
