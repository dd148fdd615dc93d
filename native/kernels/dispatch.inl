// Finds what Table has for an element type and an operation that are known at run time:
// `Table::of<D, O>()`, which is null where the operation has no meaning for the type.
// Included as arithmetic.inl is.

template <class Table, DType D> auto by_operation(Op op) {
  switch (op) {
  case Op::sum: return Table::template of<D, Op::sum>();
  case Op::prod: return Table::template of<D, Op::prod>();
  case Op::min: return Table::template of<D, Op::min>();
  case Op::max: return Table::template of<D, Op::max>();
  case Op::band: return Table::template of<D, Op::band>();
  case Op::bor: return Table::template of<D, Op::bor>();
  case Op::bxor: return Table::template of<D, Op::bxor>();
  default: return decltype(Table::template of<D, Op::sum>())(nullptr);
  }
}

template <class Table> auto by_dtype(DType dtype, Op op) {
  switch (dtype) {
  case DType::bool_: return by_operation<Table, DType::bool_>(op);
  case DType::int8: return by_operation<Table, DType::int8>(op);
  case DType::int16: return by_operation<Table, DType::int16>(op);
  case DType::int32: return by_operation<Table, DType::int32>(op);
  case DType::int64: return by_operation<Table, DType::int64>(op);
  case DType::uint8: return by_operation<Table, DType::uint8>(op);
  case DType::uint16: return by_operation<Table, DType::uint16>(op);
  case DType::uint32: return by_operation<Table, DType::uint32>(op);
  case DType::uint64: return by_operation<Table, DType::uint64>(op);
  case DType::float16: return by_operation<Table, DType::float16>(op);
  case DType::bfloat16: return by_operation<Table, DType::bfloat16>(op);
  case DType::float32: return by_operation<Table, DType::float32>(op);
  case DType::float64: return by_operation<Table, DType::float64>(op);
  case DType::complex64: return by_operation<Table, DType::complex64>(op);
  case DType::complex128: return by_operation<Table, DType::complex128>(op);
  case DType::float8_e4m3fn: return by_operation<Table, DType::float8_e4m3fn>(op);
  case DType::float8_e5m2: return by_operation<Table, DType::float8_e5m2>(op);
  default: return decltype(by_operation<Table, DType::float32>(op))(nullptr);
  }
}
