"""Reads a whole tape file into memory, and finds the sizes of the blocks that each access names."""

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
        Number by which a block is recognized: in each turn of a loop, corresponding blocks have the same label.
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
        Number of blocks that existed at the beginning or were created later.
    live, peak : int
        Bytes of the blocks that exist at the end of the tape, and the most bytes that existed at once.
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
        The accesses in the order of the tape.
    blocks : list of BlockAccess
        For each access, the blocks that it touches, the blocks that were created without content before it, and the
        blocks that are freed after it.
    touched : list of tuple of BlockInfo
        For each access, the properties of the blocks that it touches.
    entries : list of int
        For each access, a number. Equal accesses in different turns of a loop have equal numbers.
    classes : dict of str to ClassUse
        Figures of each class of blocks, by the name of the class.
    live, peak : int
        Bytes of the blocks that exist at the end of the tape, and the most bytes that existed at once.
    cut_off : str
        Reason why the file could not be read to its end; empty if the file was read completely.
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
    """Read a tape file. If the end of the file is missing, read up to the last whole chunk.

    Raises
    ------
    TapeFileError
        The file is damaged, or a record names a block that was not created before.
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
    """Return a key that is the same for accesses with the same operation, labels of blocks, and modes.

    Accesses to the same table have the same key even if they touch different rows.
    """
    # Labels and not block numbers, because a block has the same label in each turn.
    tables = {infos[run.table].label for run in access.runs if run.table >= 0}
    runs = tuple((infos[run.first].label, run.count, run.mode) for run in access.runs if run.table < 0)
    return access.op, runs, frozenset(tables)
