"""Row filters for tables: expressions over columns, parsed without running code."""

import ast
import functools
import operator

import pyarrow as pa
import pyarrow.compute as pc

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
    comparisons of columns, numbers and texts, `in [...]`, `is None`, `and`, `or` and `not`.
    """
    if where is None:
        return []
    make_filter(where, None)
    nodes = ast.walk(ast.parse(where.strip(), mode="eval"))
    return sorted({node.id for node in nodes if isinstance(node, ast.Name)})


def make_filter(where: str, schema: pa.Schema | None) -> pc.Expression:
    """Turn an expression into a pyarrow expression for tables of a schema.

    A text column that is compared with a number is cast to a number. A missing value fulfils no
    comparison, as in SQL: `width != 512 or width is None` keeps its row, `width != 512` does not.
    With schema None, the expression is only checked. Raises ValueError if it is not valid.
    """
    try:
        return build(ast.parse(where.strip(), mode="eval").body, schema)
    except SyntaxError as error:
        raise ValueError(f"{where!r} is no expression ({error.msg})") from None
    except RecursionError:
        raise ValueError(f"{where[:60]!r}... has too many parts in each other") from None


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
        f"{ast.unparse(node)!r} is no comparison of columns, numbers and texts, "
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
        value = getattr(compared, "value", None)
        is_number = isinstance(compared, ast.UnaryOp) or isinstance(value, int | float)
        if schema and is_number and isinstance(node, ast.Name):
            if pa.types.is_string(schema.field(node.id).type):
                side = side.cast(pa.float64())
        sides.append(side)
    return COMPARE[type(kind)](*sides)
