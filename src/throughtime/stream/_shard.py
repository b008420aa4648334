"""Shard: which rank of how many plays a stream here. Integers; the plan itself is `lanes.py`."""

from dataclasses import dataclass

from torch import distributed

from throughtime.errors import DataError


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `ranks`; `given` by the user, or found in the process group."""

    rank: int
    ranks: int
    given: bool

    @classmethod
    def of(cls, rank: int | None, ranks: int | None) -> "Shard":
        """As asked for; else this process's place in `torch.distributed`'s default group, if there
        is one.

        Raises:
            DataError: half of it is given, or a rank that is none of `ranks`.
        """
        if (rank is None) != (ranks is None):
            raise DataError(
                f"rank={rank}, ranks={ranks}: expected both or neither; without them"
                " torch.distributed's group says"
            )
        if rank is not None and ranks is not None:
            if not 0 <= rank < ranks:
                raise DataError(f"rank={rank}, ranks={ranks}: expected a rank from 0 to ranks - 1")
            return cls(rank, ranks, given=True)
        return cls(*_group(), given=False)

    def now(self) -> "Shard":
        """What it is in the process group that is up now; itself where the user gave it."""
        return self if self.given else Shard(*_group(), given=False)


def _group() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
