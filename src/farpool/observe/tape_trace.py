"""A tape file as a whole in memory, its accesses resolved to blocks with sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

from farpool.errors import TapeFileError, TapeTruncatedError
from farpool.memory.pager.belady import BlockAccess, Operand
from farpool.memory.tape import Access, Content, Create, Metadata, TapeFile

__all__ = ["BlockInfo", "ClassUse", "Trace", "read_trace"]


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """Size, class and label of a live block.

    Attributes
    ----------
    nbytes : int
    cls : str
    label : int
        Number of the block; in each turn of a loop, the same block has the same number.
    """

    nbytes: int
    cls: str
    label: int


@dataclass(slots=True)
class ClassUse:
    """Blocks and bytes of one class of blocks.

    Attributes
    ----------
    blocks : int
        Number of blocks that existed at the beginning or were made later.
    live, peak : int
        Bytes of existing blocks at the end, and the maximum at any time.
    """

    blocks: int = 0
    live: int = 0
    peak: int = 0


@dataclass(slots=True)
class Trace:
    """Contents of a tape file.

    Attributes
    ----------
    metadata : Metadata
    accesses : list of Access
        The accesses in the order of the program.
    blocks : list of BlockAccess
        The same accesses, as blocks that are made, touched and dropped.
    touched : list of tuple of BlockInfo
        Blocks of the operands of each access.
    entries : list of int
        The same accesses as numbers; equal accesses have equal numbers even if their blocks have other names.
    classes : dict of str to ClassUse
    live, peak : int
        Bytes of existing blocks at the end, and the maximum at any time.
    cut_off : str
        Reason why the file could not be read to its end; empty if it could.
    """

    metadata: Metadata
    accesses: list[Access] = field(default_factory=list)
    blocks: list[BlockAccess] = field(default_factory=list)
    touched: list[tuple[BlockInfo, ...]] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    classes: dict[str, ClassUse] = field(default_factory=dict)
    live: int = 0
    peak: int = 0
    cut_off: str = ""


def read_trace(tape: TapeFile) -> Trace:
    """Read a tape file; if it was cut off, up to its last whole chunk.

    Raises
    ------
    TapeFileError
        The file is damaged, or an access names a block that no record has made.
    """
    trace = Trace(tape.metadata)
    infos: dict[int, BlockInfo] = {}
    numbers: dict[tuple[object, ...], int] = {}
    created: list[int] = []
    freed: list[int] = []
    try:
        for record in tape:
            if isinstance(record, Create):
                _add(trace, record, infos)
                if record.content == Content.NONE:
                    created.extend(range(record.first, record.first + record.count))
            elif isinstance(record, Access):
                operands, touched = _resolve(record, infos)
                trace.accesses.append(record)
                trace.blocks.append(BlockAccess(operands, tuple(created)))
                trace.touched.append(touched)
                trace.entries.append(numbers.setdefault(_key(record, infos), len(numbers)))
                created.clear()
                freed = []
            else:
                members = range(record.first, record.first + record.count)
                _drop(trace, members, infos)
                freed.extend(members)
                # A block that is freed is no longer needed after the latest access, so its end belongs to that access.
                if trace.blocks:
                    trace.blocks[-1] = trace.blocks[-1]._replace(freed=tuple(freed))
    except TapeTruncatedError as error:
        trace.cut_off = str(error)
    except KeyError as error:
        raise TapeFileError(
            f"the tape file {tape.path} names block {error.args[0]}, which does not exist there; record it again"
        ) from None
    return trace


def _add(trace: Trace, record: Create, infos: dict[int, BlockInfo]) -> None:
    use = trace.classes.setdefault(record.cls, ClassUse())
    for ordinal, nbytes in enumerate(record.sizes()):
        infos[record.first + ordinal] = BlockInfo(nbytes, record.cls, record.label + ordinal)
        use.live += nbytes
        trace.live += nbytes
    use.blocks += record.count
    use.peak = max(use.peak, use.live)
    trace.peak = max(trace.peak, trace.live)


def _drop(trace: Trace, members: range, infos: dict[int, BlockInfo]) -> None:
    for block in members:
        info = infos.pop(block)
        trace.classes[info.cls].live -= info.nbytes
        trace.live -= info.nbytes


def _resolve(access: Access, infos: dict[int, BlockInfo]) -> tuple[list[Operand], tuple[BlockInfo, ...]]:
    operands = []
    for run in access.runs:
        for block in range(run.first, run.first + run.count):
            operands.append(Operand(block, infos[block].nbytes, run.mode))
    return operands, tuple(infos[operand.block] for operand in operands)


def _key(access: Access, infos: dict[int, BlockInfo]) -> tuple[object, ...]:
    """Return a key that is equal for equal accesses; accesses to any rows of the same table are equal."""
    # Labels and not block numbers, because a block has the same label in each turn.
    tables = {infos[run.table].label for run in access.runs if run.table >= 0}
    runs = tuple((infos[run.first].label, run.count, run.mode) for run in access.runs if run.table < 0)
    return access.op, runs, frozenset(tables)
