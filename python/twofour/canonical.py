"""The canonical form of a 2:4 matrix: what files hold, and what every engine packs its own layout from."""


def parts_shapes(rows: int, cols: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of the values and of the metadata of a matrix."""
    groups = -(-cols // 4)
    return (rows, 2 * groups), (rows, -(-groups // 8))
