"""Reads pickles of torch as plain data: what one names is neither imported nor called.

A pickle is a program for a machine with a stack. Only instructions that build data are carried out here, and objects
become `Built`: the name of their class, which must be in a list, with arguments and state. An OrderedDict is a dict.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pickletools import genops
from typing import Any

from torchtitan_clone.documents import DocumentError, escape, shorten


@dataclass(frozen=True, slots=True)
class Name:
    """A class, function or constant that a pickle names, as "module.name"."""

    text: str


@dataclass(eq=False, slots=True)
class Built:
    """What a pickle says of an object; keys of tables, too, are compared by identity."""

    name: str
    args: tuple[object, ...] = ()
    state: object = None


@dataclass(eq=False, slots=True)
class External:
    """What stands for data outside of the pickle, such as the values of a tensor."""

    key: object


_TABLE = "collections.OrderedDict"


class _Refused(Exception):
    """The pickle does what plain data never needs."""


def parse_pickle(content: bytes, *, where: str, names: Collection[tuple[str, str]]) -> Any:
    """Returns the data of a pickle, which may name only these pairs of module and name; DocumentError otherwise."""
    machine = _StackMachine(names)
    try:
        for opcode, argument, _ in genops(content):
            if opcode.name == "STOP":
                return machine.pop()
            machine.run(opcode.name, argument)
    except _Refused as error:
        raise DocumentError(
            f"{escape(where)}: is not plain data: the pickle {error}; nothing of it is executed"
        ) from None
    except (ValueError, IndexError, KeyError):  # truncated, or a stack or memo without what is taken
        pass
    raise DocumentError(f"{escape(where)}: is no complete pickle; copy it again")


class _StackMachine:
    """The stack and the memo."""

    def __init__(self, names: Collection[tuple[str, str]]) -> None:
        self._names = names
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        """What is under each mark."""
        self._memo: dict[int, Any] = {}

    def pop(self) -> Any:
        return self._stack.pop()

    def run(self, name: str, argument: Any) -> None:
        """Carries out one instruction."""
        if name in _WITH_VALUE:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            raise _Refused(f"has the instruction {name}")

    def mark(self, _: object) -> None:
        self._below.append(self._stack)
        self._stack = []

    def pop_to_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def put(self, place: int | None) -> None:
        self._memo[len(self._memo) if place is None else place] = self._stack[-1]

    def get(self, place: int) -> None:
        self._stack.append(self._memo[place])

    def tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self._stack.append(tuple(reversed(items)))

    def tuple_to_mark(self, _: object) -> None:
        items = self.pop_to_mark()
        self._stack.append(tuple(items))

    def append(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise _Refused("appends to what is no list")
        self._stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        # The hash of nested tuples would take a stack without limit.
        if type(self._stack[-1]) is not dict or {*map(type, items[::2])} - {str, int, Built}:
            raise _Refused("sets items of what is no table, or by keys that are neither text, nor numbers, nor objects")
        self._stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise _Refused("names what is no text")
        if (module, name) not in self._names:
            raise _Refused(f"names {shorten(f'{module}.{name}')}")
        self._stack.append(Name(f"{module}.{name}"))

    def call(self, _: object) -> None:
        args, called = self.pop(), self.pop()
        if not isinstance(called, Name) or not isinstance(args, tuple):
            raise _Refused("calls what it does not name")
        is_table = (called.text, args) == (_TABLE, ())
        self._stack.append({} if is_table else Built(called.text, args))

    def set_state(self, _: object) -> None:
        state, built = self.pop(), self._stack[-1]
        if type(built) is dict:  # attributes of a state dict, such as versions of its modules
            return
        if not isinstance(built, Built):
            raise _Refused("sets the state of what it did not build")
        built.state = state

    def persistent(self, _: object) -> None:
        self._stack.append(External(self.pop()))


_WITH_VALUE = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANTS: Mapping[str, Callable[[], object]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_ACTIONS: Mapping[str, Callable[[_StackMachine, Any], None]] = {
    "MARK": _StackMachine.mark,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _StackMachine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _StackMachine.get),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "TUPLE": _StackMachine.tuple_to_mark,
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.pop_to_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.pop() for _ in range(2)][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "GLOBAL": lambda machine, pair: machine.name(*pair.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.name(*[machine.pop() for _ in range(2)][::-1]),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _StackMachine.call),
    "BUILD": _StackMachine.set_state,
    "BINPERSID": _StackMachine.persistent,
}
"""What each instruction does; all others are refused."""
