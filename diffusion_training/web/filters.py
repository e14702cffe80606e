"""Row filters for tables: expressions over columns, parsed without running code."""

import ast
import functools
import operator

import pyarrow as pa
import pyarrow.compute as pc

TEXT = pa.string(), pa.large_string(), pa.string_view()
COMPARE = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def find_columns(where: str | None) -> list[str]:
    """Names of the columns in an expression such as "similarity > 0.3 and width >= 512".

    Returns no names for None. Raises ValueError if the text is not a valid expression. Allowed are
    comparisons of columns, numbers and texts, `in [...]`, `is None`, `and`, `or` and `not`. A
    column whose name is not one word is written as column('aspect ratio').
    """
    if where is None:
        return []
    make_filter(where, None)
    return sorted({node.id for node in ast.walk(parse(where)) if isinstance(node, ast.Name)})


def make_filter(where: str, schema: pa.Schema | None) -> pc.Expression:
    """Turn an expression into a pyarrow expression for tables of a schema.

    A text column that is compared with a number is cast to a number. A missing value fulfils no
    comparison, as in SQL: `width != 512` drops its row, `width != 512 or width is None` keeps it.
    With schema None, the expression is only checked. Raises ValueError if it is not valid.
    """
    try:
        return build(parse(where), schema)
    except SyntaxError as error:
        raise ValueError(f"{where!r} is not an expression ({error.msg})") from None
    except RecursionError:
        raise ValueError(f"{where[:60]!r}... is nested too deeply") from None


class NameColumns(ast.NodeTransformer):
    """Turns column('aspect ratio') into the name of that column."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(ast.Name("column"), [ast.Constant(str(name))], []):
                return ast.Name(name)
        return node


def parse(where: str) -> ast.expr:
    """The syntax tree of an expression. Raises SyntaxError if it is not valid."""
    return NameColumns().visit(ast.parse(where.strip(), mode="eval")).body


def find_non_number(where: str, table: pa.Table) -> str | None:
    """A sentence on the first text that is compared with a number but is not one, or None."""
    for node in ast.walk(parse(where)):
        if not isinstance(node, ast.Compare):
            continue
        parts = [node.left]
        for part in node.comparators:
            parts += part.elts if isinstance(part, ast.List | ast.Tuple) else [part]
        names = [part.id for part in parts if isinstance(part, ast.Name)]
        for name in names if any(map(is_number, parts)) else ():
            for text in table[name].unique().drop_null() if holds_text(table.schema, name) else ():
                try:
                    text.cast(pa.float64())
                except pa.ArrowInvalid:
                    return f"column {name!r} holds {text.as_py()[:60]!r}, which is not a number"
    return None


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) or isinstance(getattr(node, "value", None), int | float)


def holds_text(schema: pa.Schema, column: str) -> bool:
    kind = schema.field(column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind in TEXT


def build(node: ast.AST, schema: pa.Schema | None) -> pc.Expression:
    """Turn a node of the syntax tree into a pyarrow expression."""
    match node:
        case ast.BoolOp(ast.And() | ast.Or() as kind, parts):
            join = operator.and_ if isinstance(kind, ast.And) else operator.or_
            return functools.reduce(join, [build(part, schema) for part in parts])
        case ast.UnaryOp(ast.Not(), part):
            return ~build(part, schema)
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
            return pc.scalar(-number)
        case ast.Name(name):
            return pc.field(name)
        case ast.Constant(bool() | int() | float() | str() as value):
            return pc.scalar(value)
        case ast.Compare(left, [ast.Is() | ast.IsNot() as kind], [ast.Constant(None)]):
            is_missing = build(left, schema).is_null()
            return is_missing if isinstance(kind, ast.Is) else ~is_missing
        case ast.Compare(
            left, [ast.In() | ast.NotIn() as kind], [ast.List(items) | ast.Tuple(items)]
        ) if items:
            matches = [compare(ast.Eq(), left, item, schema) for item in items]
            is_member = functools.reduce(operator.or_, matches)
            return is_member if isinstance(kind, ast.In) else ~is_member
        case ast.Compare(left, kinds, rights) if all(type(kind) in COMPARE for kind in kinds):
            pairs = zip(kinds, [left, *rights], rights, strict=False)
            comparisons = [compare(*pair, schema) for pair in pairs]
            return functools.reduce(operator.and_, comparisons)
    raise ValueError(
        f"{ast.unparse(node)!r} is not a comparison of columns, numbers and texts, "
        "such as width >= 512"
    )


def compare(
    kind: ast.cmpop, left: ast.expr, right: ast.expr, schema: pa.Schema | None
) -> pc.Expression:
    """Compare two parts of an expression.

    A text column that is compared with a number is cast to a number, since all columns of a CSV
    file are text.
    """
    sides = []
    for node, compared in ((left, right), (right, left)):
        side = build(node, schema)
        if schema and isinstance(node, ast.Name):
            is_text = holds_text(schema, node.id)
            if is_text and pa.types.is_dictionary(schema.field(node.id).type):
                side = side.cast(pa.string())
            if is_text and is_number(compared):
                side = side.cast(pa.float64())
            if not is_text and isinstance(getattr(compared, "value", None), str):
                raise ValueError(
                    f"column {node.id!r} holds {schema.field(node.id).type}, but "
                    f"{ast.unparse(compared)} is text"
                )
        sides.append(side)
    return COMPARE[type(kind)](*sides)
