"""The position of a rank in its training data, and how a restarted process returns to it.

Three ways of giving data to DeepSpeed:

* ``training_data=`` given to ``deepspeed.initialize``: the engine owns the loader. The generators' states at the
  begin of the epoch and before its first batch, the sampler's epoch and the number of batches drawn are saved. A
  restarted process sets those states, begins the epoch and skips as many batches: exact for any sampler of torch.
* an iterator given to ``train_batch``, or set by ``set_dataloader``: items drawn from it are counted, and a
  restarted process skips as many, unless the script has registered an object named ``data``: the position is its.
  The first of them must be the one that the job began with: an iterator that stands elsewhere is not skipped over.
* a script that draws its batches itself and calls ``engine(batch)``: the position is the script's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader

from ftckpt.errors import ConfigError, MismatchError, UnsupportedError
from ftckpt.frameworks.entry import Proxy
from ftckpt.frameworks.torch_state import load_generators, save_generators
from ftckpt.model.objects import encode


@dataclass
class Epoch:
    """One pass through a loader: what its order follows from, and how many batches were drawn.

    ``begin`` and ``first`` are the generators' states when the pass began, and before its first batch: a sampler
    draws its permutation then, a worker its seed. ``sampler`` is the number that ``set_epoch`` was given.
    """

    begin: Mapping[str, Any] | None
    sampler: int | None
    first: Mapping[str, Any] | None = None
    drawn: int = 0


class EpochBegins:
    """The generators' states at the last begin of each loader's epoch, while ``recorded`` is entered."""

    def __init__(self) -> None:
        self._states: dict[int, Mapping[str, Any]] = {}

    def of(self, loader: Any) -> Mapping[str, Any] | None:
        """The states when the epoch under way began; None where none did."""
        return self._states.get(id(loader))

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Within it, any loader of DeepSpeed may begin an epoch: a PipelineEngine's does when it is built."""
        original = DeepSpeedDataLoader.__iter__

        def begin(loader: Any) -> Any:
            self._states[id(loader)] = save_generators()
            return original(loader)

        # On the class: the loader that begins here does not exist yet. Only while one engine is made.
        DeepSpeedDataLoader.__iter__ = begin
        try:
            yield
        finally:
            DeepSpeedDataLoader.__iter__ = original


class CountingIterator(Proxy):
    """An iterator, how many items were drawn from it, and a digest of the first one."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        super().__init__(iterator)
        self.num_drawn = 0
        self.first: str | None = None

    def __iter__(self) -> CountingIterator:
        return self

    def __next__(self) -> Any:
        item = next(self.wrapped)
        if not self.num_drawn:
            self.first = _digest(item)
        self.num_drawn += 1
        return item


class DataPosition:
    """Saved and loaded as one of the objects of the training state.

    Args:
        engine: whose data it is.
        begins: of an epoch that began before this object was made.
        owned_by_script: the script has registered an object that knows the position of its own iterators.
    """

    def __init__(self, engine: Any, begins: EpochBegins, owned_by_script: bool) -> None:
        self._engine = engine
        self._owned_by_script = owned_by_script
        self.set_rng: Callable[[], None] = _nothing
        """Sets the generators to what was restored; called before the first batch is drawn."""
        self.draws: Callable[[], None] = _nothing
        """Called before a batch is drawn from the engine's own loader."""
        self.log: Callable[[str], None] = _nothing
        """Takes one line for people."""
        self._given = engine.training_dataloader
        self._loader = _engine_loader(self._given)
        self._loader_class: Any = type(self._loader)
        self._epoch = Epoch(begins.of(self._loader), None)
        self._counting: CountingIterator | None = None
        self._restored: Mapping[str, Any] | None = None
        self._rng_is_set = False
        self._is_behind = False
        """The restored epoch has begun, and its batches have yet to be skipped."""
        self._has_peeked = False
        """A batch was drawn, and nothing was trained yet."""
        if self._loader is not None:
            self._epoch.sampler = _sampler_epoch(self._loader)
            self._follow_loader()

    @property
    def is_known(self) -> bool:
        """Whether anything here, or an object of the script, says where in the data training stands."""
        return self._loader is not None or self._owned_by_script or bool(self._engine.pipeline_parallelism)

    def state_dict(self) -> dict[str, Any]:
        """The position at this boundary."""
        counting = self._counting
        num_drawn, first = (counting.num_drawn, counting.first) if counting is not None else (0, None)
        return {"epoch": dict(vars(self._epoch)), "drawn": num_drawn, "first": first, "samples": self._num_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand there before the first batch is drawn."""
        self._restored = state

    def load_reshaped(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Stand at the same sample in another layout: its ranks draw more or fewer in a row, all together the same.

        So do torch's samplers for several ranks, and scripts that deal a batch out to their ranks.

        Raises:
            MismatchError: here a draw of all ranks would begin in the middle of one.
        """
        state = states[0]
        epoch, samples = dict(state["epoch"]), state["samples"]
        # Ranks of other places began with other items, and drew other numbers.
        self._restored = {
            **state, "epoch": {**epoch, "drawn": self._drawn_here(epoch["drawn"], samples)},
            "drawn": 0 if self._owned_by_script else self._drawn_here(state["drawn"], samples), "first": None,
        }  # fmt: skip

    def begin_training(self) -> None:
        """A batch is about to be used: before the first one go to the position, then set RNG unless a draw has."""
        if self._restored is not None and isinstance(self._given, RepeatingLoader):
            # A RepeatingLoader began its epoch when the engine was built, before anything was restored.
            self._given.data_iter = iter(self._given.loader)
            if self._is_behind:
                self._replay()
        # A pipeline draws its batches after this, and needs to know what was restored: see ``draw_from``.
        if not self._engine.pipeline_parallelism:
            self._set_rng_once()
            self._restored = None

    def draw_from(self, given: Any) -> Any:
        """What ``train_batch`` shall draw from where it is given ``given``; items of the script's are counted."""
        iterator = given if given is not None else self._engine.data_iterator
        # The engine's own loader is followed by its class, and counts for itself.
        if iterator is None or iterator is self._given:
            self._set_rng_once()
            self._restored = None
            return given
        if isinstance(iterator, CountingIterator):
            self._counting = iterator
        elif self._counting is None or self._counting.wrapped is not iterator:
            self._counting = CountingIterator(iterator)
        if self._restored is not None:
            self._skip(self._counting, self._restored["drawn"], self._restored["first"])
            self._restored = None
        self._set_rng_once()
        if given is None:
            self._engine.data_iterator = self._counting
            return None
        return self._counting

    def remove(self) -> None:
        """Follow the engine's loader and the script's iterator no longer."""
        if self._counting is not None and self._engine.data_iterator is self._counting:
            self._engine.data_iterator = self._counting.wrapped
        if self._loader is not None:
            self._loader.__class__ = self._loader_class

    @property
    def _num_samples(self) -> int:
        """What all ranks draw together at once."""
        return int(self._engine.train_micro_batch_size_per_gpu()) * int(self._engine.dp_world_size)

    def _drawn_here(self, drawn: int, samples: int) -> int:
        number, rest = divmod(drawn * samples, self._num_samples)
        if rest:
            raise MismatchError(
                f"the snapshot is behind {drawn * samples} samples of its data, and this layout draws "
                f"{self._num_samples} at once (train_micro_batch_size_per_gpu times replicas): choose a micro-batch "
                "size that divides them; a script that gives train_batch an iterator may register an object named "
                "data that knows the position (ftckpt.deepspeed.register)"
            )
        return number

    def _set_rng_once(self) -> None:
        if not self._rng_is_set:
            self._rng_is_set = True
            self.set_rng()

    def _skip(self, items: CountingIterator, number: int, first: str | None) -> None:
        if not number:
            return
        if self._owned_by_script:
            self.log("data: where the iterator given to train_batch stands is left to the registered object")
            return
        self.log(f"data: skipping the {number} items that were drawn before from the iterator given to train_batch")
        for index in range(number):
            try:
                # Drawn through the counter: skipped items are counted as drawn, as they were before.
                next(items)
            except StopIteration:
                raise ConfigError(
                    f"data: the iterator given to train_batch ends after {index} of the {number} items that were "
                    "drawn before; register an object that knows the position (ftckpt.deepspeed.register)"
                ) from None
            if first is not None and items.first != first:
                raise ConfigError(
                    "data: the iterator given to train_batch does not begin with the item that the job began with: "
                    f"the {number} items to skip are not those that were drawn before; let it begin there, or "
                    "register an object named data that knows the position (ftckpt.deepspeed.register)"
                )
        self._rng_is_set = False  # items that are made when they are drawn may have drawn numbers

    def _follow_loader(self) -> None:
        """Give the one loader a class of its own: ``iter`` and ``next`` look for methods in the class alone.

        A copy of the loader, or a pickle, is of the class that it had before.
        """
        begin, draw, base = self._begin_epoch, self._draw, self._loader_class

        def reduce(loader: Any, protocol: Any) -> Any:
            _, (_, *arguments), *state = base.__reduce_ex__(loader, protocol)
            return base.__new__, (base, *arguments), *state

        methods = {"__iter__": lambda loader: begin(), "__next__": lambda loader: draw(), "__reduce_ex__": reduce}
        self._loader.__class__ = type(base.__name__, (base,), methods)

    def _begin_epoch(self) -> Any:
        """What ``iter`` of the loader does."""
        self.draws()
        if self._restored is not None and self._begin_restored():
            return self._loader
        # Before the loader's own ``iter``, which draws the seed of its workers.
        self._epoch = Epoch(save_generators(), _sampler_epoch(self._loader))
        return self._loader_class.__iter__(self._loader)

    def _draw(self) -> Any:
        """What ``next`` of the loader does."""
        self.draws()
        if self._restored is not None:
            if self._is_behind:
                self._replay()
            self._set_rng_once()
            self._has_peeked = True
        epoch = self._epoch
        if epoch.first is None:
            epoch.first = save_generators()
        try:
            batch = self._loader_class.__next__(self._loader)
        except StopIteration:
            self._restored = None
            raise
        # Behind the draw: a batch that failed was not drawn.
        epoch.drawn += 1
        return batch

    def _begin_restored(self) -> bool:
        """An epoch begins; returns whether it is the restored one, which the first draw will go through.

        As long as nothing was trained, a script that has drawn a batch only to look at it begins where it began
        before. One that begins twice and draws nothing in between has done so in the unbroken run too.
        """
        assert self._restored is not None
        epoch = Epoch(**self._restored["epoch"])
        has_begun = epoch.begin is not None or epoch.drawn > 0
        self._is_behind = has_begun and epoch.drawn < len(self._loader)
        if self._is_behind or self._has_peeked:
            self._rng_is_set = self._has_peeked = False
        if not self._is_behind:
            self._set_rng_once()
        return self._is_behind

    def _replay(self) -> None:
        """Begin the epoch that was under way once more, and skip the batches drawn."""
        assert self._restored is not None
        self._is_behind = False
        self._epoch = epoch = Epoch(**self._restored["epoch"])
        sampler = self._loader.data_sampler
        if epoch.sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch.sampler)
        if epoch.begin is not None:
            load_generators(epoch.begin)
        self._loader_class.__iter__(self._loader)
        if epoch.drawn:
            self.log(f"data: skipping the {epoch.drawn} batches of this epoch that were drawn before")
            assert epoch.first is not None, "what was drawn was preceded by a first draw"
            load_generators(epoch.first)
        for _ in range(epoch.drawn):
            self._loader_class.__next__(self._loader)


def _nothing(*args: Any) -> None:
    """Until a state and a log are known."""


def _digest(item: Any) -> str | None:
    """Of an item's bytes; None where it has something that is no number, text, array or tensor."""
    try:
        return xxhash.xxh3_64_hexdigest(encode(item))
    except UnsupportedError:
        return None


def _sampler_epoch(loader: Any) -> Any:
    return getattr(loader.data_sampler, "epoch", None)


def _engine_loader(given: Any) -> Any:
    """The DeepSpeedDataLoader that an engine has made for itself, or None."""
    loader = given.loader if isinstance(given, RepeatingLoader) else given
    return loader if isinstance(loader, DeepSpeedDataLoader) else None
