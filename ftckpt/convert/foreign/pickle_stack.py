"""Reads pickles of data: the ``.metadata`` of torch.distributed.checkpoint, whose opcodes ``torch.load`` refuses.

A stack machine over what ``pickletools`` takes apart. Nothing is imported and nothing is called but what the caller
lists, so that a file can at worst make odd data.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import Any

from ftckpt.errors import ConvertError

Known = Callable[[str], Any]
"""What stands for a global, by its full name; raises LookupError for what may not be in such a file."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset((
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE",
    "BINBYTES", "BINBYTES8", "SHORT_BINBYTES",
))  # fmt: skip
_EMPTY: Mapping[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": set,
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read(data: bytes, name: str, known: Known) -> Any:
    """The value that a pickle describes; ``name`` is the file's, for errors.

    Raises:
        ConvertError: truncated, damaged, or it names what ``known`` does not.
    """
    machine = _Machine(name, known)
    try:
        # pickletools only takes bytes apart: unlike pickle, it imports and calls nothing.
        for opcode, argument, _ in pickletools.genops(data):
            machine.run(opcode.name, argument)
        return machine.stack.pop()
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ConvertError(f"{name} is truncated or damaged: {error}") from None


class _Machine:
    def __init__(self, name: str, known: Known) -> None:
        self.stack: list[Any] = []
        self._name = name
        self._known = known
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        if opcode in _VALUES:
            stack.append(argument)
        elif opcode in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            self._memo[len(self._memo) if opcode == "MEMOIZE" else argument] = stack[-1]
        elif opcode in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in _EMPTY:
            stack.append(_EMPTY[opcode]())
        elif opcode in _TUPLES:
            items = tuple(stack[-_TUPLES[opcode] :])
            del stack[-_TUPLES[opcode] :]
            stack.append(items)
        elif opcode == "MARK":
            # Everything up to the opcode that collects goes onto a stack of its own.
            self._marks.append(stack)
            self.stack = []
        elif opcode not in ("PROTO", "FRAME", "STOP"):
            self._make(opcode, argument)

    def _make(self, opcode: str, argument: Any) -> None:
        if opcode == "GLOBAL":
            self.stack.append(self._find(*argument.split(" ", 1)))
        elif opcode == "STACK_GLOBAL":
            attribute, module = self.stack.pop(), self.stack.pop()
            self.stack.append(self._find(module, attribute))
        elif opcode in ("REDUCE", "NEWOBJ"):
            arguments, function = self.stack.pop(), self.stack.pop()
            self.stack.append(function(*arguments))
        elif opcode == "BUILD":
            state = self.stack.pop()
            self.stack[-1].__setstate__(state)
        else:
            self._collect(opcode)

    def _collect(self, opcode: str) -> None:
        if opcode in ("SETITEM", "APPEND"):
            count = 2 if opcode == "SETITEM" else 1
            items = self.stack[-count:]
            del self.stack[-count:]
        else:
            items, self.stack = self.stack, self._marks.pop()
        if opcode in ("TUPLE", "FROZENSET"):
            self.stack.append(tuple(items) if opcode == "TUPLE" else frozenset(items))
        elif opcode in ("SETITEM", "SETITEMS"):
            # The method of ``dict`` itself: what stands there may be an object with methods of its own.
            dict.update(self.stack[-1], zip(items[::2], items[1::2], strict=True))
        elif opcode in ("APPEND", "APPENDS"):
            list.extend(self.stack[-1], items)
        elif opcode == "ADDITEMS":
            set.update(self.stack[-1], items)
        else:
            raise ConvertError(f"{self._name}: uses {opcode}, which files of this kind do not need")

    def _find(self, module: str, attribute: str) -> Any:
        full_name = f"{module}.{attribute}"
        try:
            return self._known(full_name)
        except LookupError:
            raise ConvertError(
                f"{self._name} holds {full_name}, which is not made from files, as it could run code"
            ) from None
