"""What the native core offers to other extension modules, by way of ctypes."""

import ctypes

from unisono import _native

HOOK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)
_OBJECT, _AT, _NUMBER = ctypes.py_object, ctypes.c_void_p, ctypes.c_int64


class Message(ctypes.Structure):
    """As src/unisono/interop/torch/hooks.hpp has it."""

    _fields_ = (
        ("sends", ctypes.c_bool),
        ("peer", _NUMBER),
        ("tag", _NUMBER),
        ("data", _AT),
        ("bytes", ctypes.c_size_t),
        ("collective", ctypes.c_int),
        ("dtype", ctypes.c_int),
        ("count", ctypes.c_uint64),
        ("timeout", _NUMBER),
    )


class Hooks(ctypes.Structure):
    """As src/unisono/interop/torch/hooks.hpp has it."""

    _PLANNED = (_OBJECT, _OBJECT, _AT, _AT, _NUMBER)
    _OF_WORK = ctypes.PYFUNCTYPE(ctypes.c_int, _OBJECT)
    _fields_ = (
        ("when_done", ctypes.PYFUNCTYPE(ctypes.c_int, _OBJECT, HOOK, _AT)),
        ("run_planned", ctypes.PYFUNCTYPE(ctypes.c_int, *_PLANNED)),
        ("submit_planned", ctypes.PYFUNCTYPE(_AT, *_PLANNED)),
        ("begin_message", ctypes.PYFUNCTYPE(_AT, _OBJECT, ctypes.POINTER(Message))),
        ("state", _OF_WORK),
        ("wait", _OF_WORK),
        ("is_written", _OF_WORK),
    )


def hooks():
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    at = get(_native.work_hooks(), b"unisono.work_hooks.3")
    return ctypes.cast(at, ctypes.POINTER(Hooks)).contents


def made(at):
    """The object of a new reference, which may be null: then None."""
    if at is None:
        return None
    found = ctypes.cast(at, ctypes.py_object).value
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(found))
    return found
