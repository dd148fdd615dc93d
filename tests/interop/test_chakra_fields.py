"""Chakra's files are those that protobuf's own library reads and writes."""

import pytest

import unisono
from unisono.errors import BadArgument
from unisono.interop import chakra
from unisono.interop.chakra import ChakraNode

pytest.importorskip("google.protobuf")
import chakra_schema as schema

Node = schema.node_class()
VALUES = {
    "double": 0.1,
    "float": 0.5,
    "int32": -3,
    "int64": -(1 << 40),
    "uint32": 7,
    "uint64": (1 << 64) - 1,
    "sint32": -5,
    "sint64": -(1 << 63),
    "fixed32": 9,
    "fixed64": 1 << 50,
    "sfixed32": -9,
    "sfixed64": -(1 << 50),
    "bool": False,
    "string": "é",
}


def written(nodes):
    """Each node as protobuf reads it, after the message with the version."""
    _, *parts = chakra._delimited(chakra.dumps(nodes))
    return [Node.FromString(part) for part in parts]


def read(tmp_path, *nodes):
    """What is read of a file with nodes that protobuf wrote, and its bytes."""
    parts = [b"\x0a\x050.0.4", *(node.SerializeToString() for node in nodes)]
    data = b"".join(chakra._varint(len(part)) + part for part in parts)
    path = tmp_path / "a.et"
    path.write_bytes(data)
    return chakra.load(path), data


def fields(node):
    return {one.name: one.WhichOneof("value") for one in node.attr}


def test_node_has_the_fields_of_the_schema():
    node = ChakraNode(4, "step", "compute", (2, 3), 0.5, 1e-3)
    (made,) = written([node])
    assert (made.id, made.name, made.type) == (4, "step", 4)
    assert list(made.data_deps) == [2, 3]
    assert (made.start_time_micros, made.duration_micros) == (500_000, 1000)


def test_messages_are_written_in_the_fields_where_simulators_look():
    """comm_src and others as int32, tensor_size as uint64, all else as int64."""
    schedule = unisono.schedule("all_reduce", "ring", n=3)
    made = written(chakra.nodes_of(schedule, 3 << 20)[1])
    assert {node.type for node in made} == {5, 6}
    for node in made:
        assert fields(node) == {
            "is_cpu_op": "bool_val",
            **dict.fromkeys(("comm_src", "comm_dst", "comm_tag"), "int32_val"),
            "comm_size": "int64_val",
        }
        value = {one.name: one for one in node.attr}
        assert value["comm_size"].int64_val == 1 << 20
        assert value["comm_tag"].int32_val == node.id
        assert 1 in (value["comm_src"].int32_val, value["comm_dst"].int32_val)


def test_work_and_collectives_are_written_in_the_fields_where_simulators_look():
    facts = {"num_ops": 5, "tensor_size": 1 << 40, "comm_type": 7, "comm_priority": 1}
    (made,) = written([ChakraNode(1, "a", "compute", attributes=facts)])
    assert [one.int64_val for one in made.attr] == [5, 0, 7, 0]
    assert [one.uint64_val for one in made.attr] == [0, 1 << 40, 0, 0]
    assert [one.int32_val for one in made.attr] == [0, 0, 0, 1]


def test_nodes_that_called_and_nodes_to_wait_for_stay_apart(tmp_path):
    """Also in their order, and with a node twice."""
    node = Node(id=9, ctrl_deps=[7, 300, 2], data_deps=[8, 1, 8], type=7)
    (found,), data = read(tmp_path, node)
    assert (found.parents, found.after) == ((7, 300, 2), (8, 1, 8))
    assert chakra.dumps([found]) == data
    assert written([found]) == [node]


@pytest.mark.parametrize("name", ["x", "comm_src", "tensor_size"])
@pytest.mark.parametrize("kind", schema.SCALARS)
def test_attribute_keeps_its_type(tmp_path, name, kind):
    node = Node(id=1, name="a", type=4)
    setattr(node.attr.add(name=name), f"{kind}_val", VALUES[kind])
    (found,), data = read(tmp_path, node)
    assert found.attributes == {name: VALUES[kind]}
    assert chakra.dumps([found]) == data


def test_lists_inputs_and_outputs_are_kept_as_they_are(tmp_path):
    node = Node(id=1, name="a", type=7)
    node.inputs.values, node.outputs.types = "[1, 2]", "['Tensor(float)']"
    node.attr.add(name="involved_dim").bool_list.values.extend([True, False])
    node.attr.add(name="comm_size").int64_val = 8
    (found,), data = read(tmp_path, node)
    assert found.attributes == {"comm_size": 8}
    assert chakra.dumps([found]) == data


def test_types_are_those_of_the_schema():
    assert {name: at for name, (at, _) in schema.SCALARS.items()} == chakra.TYPES


@pytest.mark.parametrize(
    ("name", "value", "types", "words"),
    [
        ("comm_tag", 1 << 31, {}, "comm_tag = 2147483648 cannot be written as int32"),
        ("tensor_size", -1, {}, "whole numbers of 0 to"),
        ("x", "text", {"x": "int64"}, "text is a string"),
        ("x", 1, {"x": "string"}, "text is a string"),
        ("x", 1.5, {"x": "sint32"}, "whole numbers of -2147483648 to 2147483647"),
        ("x", 1.5, {"x": "fixed32"}, "cannot be written as fixed32"),
        ("x", 1, {"x": "int16"}, "there is no type 'int16'.*another of double, "),
    ],
)
def test_attribute_that_does_not_fit_its_type_is_refused(name, value, types, words):
    node = ChakraNode(1, "a", "compute", attributes={name: value}, types=types)
    with pytest.raises(BadArgument, match=words):
        chakra.dumps([node])


def test_number_in_the_form_of_another_type_is_refused(tmp_path):
    attribute = b"\x0a\x01x\x38\x01"  # int32, and by the next byte a string
    wrong = attribute.replace(b"\x38\x01", b"\x3a\x01a")
    node = b"\x52" + bytes([len(wrong)]) + wrong
    path = tmp_path / "a.et"
    path.write_bytes(b"\x00" + bytes([len(node)]) + node)
    with pytest.raises(BadArgument, match="int32 in the form of another"):
        chakra.load(path)
