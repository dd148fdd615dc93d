"""Chakra's messages for protobuf's own library, by the numbers of their fields."""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

INT32, INT64, UINT64, STRING, MESSAGE = 5, 3, 4, 9, 11
SCALARS = {
    "double": (3, 1),
    "float": (5, 2),
    "int32": (7, INT32),
    "int64": (9, INT64),
    "uint32": (11, 13),
    "uint64": (13, UINT64),
    "sint32": (15, 17),
    "sint64": (17, 18),
    "fixed32": (19, 7),
    "fixed64": (21, 6),
    "sfixed32": (23, 15),
    "sfixed64": (25, 16),
    "bool": (27, 8),
    "string": (29, 9),
}
"""Of an attribute: the field of each type, and protobuf's own number of the type."""
NODE = [
    *[("id", 1, UINT64, False), ("name", 2, STRING, False), ("type", 3, INT32, False)],
    *[("ctrl_deps", 4, UINT64, True), ("data_deps", 5, UINT64, True)],
    *[("start_time_micros", 6, UINT64, False), ("duration_micros", 7, UINT64, False)],
    *[("inputs", 8, MESSAGE, False), ("outputs", 9, MESSAGE, False)],
    ("attr", 10, MESSAGE, True),
]
IO_INFO = [("values", 1, STRING), ("shapes", 2, STRING), ("types", 3, STRING)]
OF_FIELD = {"inputs": ".IOInfo", "outputs": ".IOInfo", "attr": ".Attribute"}


def _list(file, name, kind):
    made = file.message_type.add(name=name)
    made.field.add(name="values", number=1, type=kind, label=3)


def _attribute(file):
    made = file.message_type.add(name="Attribute")
    made.field.add(name="name", number=1, type=STRING, label=1)
    made.field.add(name="doc_string", number=2, type=STRING, label=1)
    made.oneof_decl.add(name="value")
    for name, (number, kind) in SCALARS.items():
        field = made.field.add(name=f"{name}_val", number=number, type=kind, label=1)
        field.oneof_index = 0
        _list(file, f"{name}_values", kind)
        field = made.field.add(name=f"{name}_list", number=number + 1, label=1)
        field.type, field.type_name = MESSAGE, f".{name}_values"
        field.oneof_index = 0


def _node(file):
    made = file.message_type.add(name="Node")
    for name, number, kind, repeated in NODE:
        field = made.field.add(name=name, number=number, type=kind, label=1)
        field.label = 3 if repeated else 1
        if kind == MESSAGE:
            field.type_name = OF_FIELD[name]


def node_class():
    """The class of nodes."""
    file = descriptor_pb2.FileDescriptorProto(name="c.proto", syntax="proto3")
    info = file.message_type.add(name="IOInfo")
    for name, number, kind in IO_INFO:
        info.field.add(name=name, number=number, type=kind, label=1)
    _attribute(file)
    _node(file)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Node"))
