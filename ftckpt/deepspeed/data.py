"""The position of a rank in its training data, and the return of a restarted process to it.

Three ways of passing data to DeepSpeed:

* ``training_data=`` of ``deepspeed.initialize``: the engine owns the loader. Saved are the generators' states at the
  start of the epoch and before its first batch, the sampler's epoch, and the number of batches drawn. A restarted
  process sets those states, starts the epoch and skips as many batches: exact for every sampler of torch.
* an iterator passed to ``train_batch``, or set by ``set_dataloader``: items drawn from it are counted, and a
  restarted process skips as many, unless the script has registered an object named ``data`` that restores the
  position. The first item must be the first one of the job: an iterator at another position is an error.
* a script that draws its batches itself and calls ``engine(batch)``: the script restores the position.
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
    """One pass through a loader: everything that determines its order, and the number of batches drawn.

    ``begin`` and ``first`` are the generators' states at the start of the pass and before its first batch: workers
    draw their seed and samplers their permutation then. ``sampler`` is the argument of ``set_epoch``.
    """

    begin: Mapping[str, Any] | None
    sampler: int | None
    first: Mapping[str, Any] | None = None
    drawn: int = 0


class EpochBegins:
    """The generators' states at the last epoch start of each loader within ``recorded``."""

    def __init__(self) -> None:
        self._states: dict[int, Mapping[str, Any]] = {}

    def of(self, loader: Any) -> Mapping[str, Any] | None:
        """The states at the start of the loader's current epoch; None if none has started."""
        return self._states.get(id(loader))

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Records epoch starts of all DeepSpeed loaders: a PipelineEngine starts one when it is built."""
        original = DeepSpeedDataLoader.__iter__

        def begin(loader: Any) -> Any:
            self._states[id(loader)] = save_generators()
            return original(loader)

        # On the class, because the loader does not exist yet; only while one engine is built.
        DeepSpeedDataLoader.__iter__ = begin
        try:
            yield
        finally:
            DeepSpeedDataLoader.__iter__ = original


class CountingIterator(Proxy):
    """An iterator that counts its items and stores a digest of the first one."""

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
    """The position in the data of an engine, as an object of the training state.

    Args:
        engine: the engine that is fed.
        begins: epoch starts before this object was created.
        owned_by_script: the script has registered an object that restores the position of its own iterators.
    """

    def __init__(self, engine: Any, begins: EpochBegins, owned_by_script: bool) -> None:
        self._engine = engine
        self._owned_by_script = owned_by_script
        self.set_rng: Callable[[], None] = _nothing
        """Sets the generators to their restored states; called before the first batch is drawn."""
        self.draws: Callable[[], None] = _nothing
        """Called before a batch is drawn from the engine's own loader."""
        self.log: Callable[[str], None] = _nothing
        """Logs one line."""
        self._given = engine.training_dataloader
        self._loader = _engine_loader(self._given)
        self._loader_class: Any = type(self._loader)
        self._epoch = Epoch(begins.of(self._loader), None)
        self._counting: CountingIterator | None = None
        self._restored: Mapping[str, Any] | None = None
        self._rng_is_set = False
        self._is_behind = False
        """The restored epoch has started, but its batches have not been skipped yet."""
        self._has_peeked = False
        """A batch was drawn, but nothing was trained yet."""
        if self._loader is not None:
            self._epoch.sampler = _sampler_epoch(self._loader)
            self._follow_loader()

    @property
    def is_known(self) -> bool:
        """Whether this object or one of the script restores the position."""
        return self._loader is not None or self._owned_by_script or bool(self._engine.pipeline_parallelism)

    def state_dict(self) -> dict[str, Any]:
        """The position at this boundary."""
        counting = self._counting
        num_drawn, first = (counting.num_drawn, counting.first) if counting is not None else (0, None)
        return {"epoch": dict(vars(self._epoch)), "drawn": num_drawn, "first": first, "samples": self._num_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the position to which to return before the first batch is drawn."""
        self._restored = state

    def load_reshaped(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Sets the position to the same sample in another layout, whose ranks draw more or fewer samples at a time.

        Assumes that ranks divide one sequence, as torch's distributed samplers and scripts that split batches do.

        Raises:
            MismatchError: the sample is not at the start of a draw of all ranks in this layout.
        """
        state = states[0]
        epoch, samples = dict(state["epoch"]), state["samples"]
        # Ranks at other coordinates started with other items and drew other random numbers.
        self._restored = {
            **state, "epoch": {**epoch, "drawn": self._drawn_here(epoch["drawn"], samples)},
            "drawn": 0 if self._owned_by_script else self._drawn_here(state["drawn"], samples), "first": None,
        }  # fmt: skip

    def begin_training(self) -> None:
        """Must be called before a batch is used: the first call restores the position, and RNG unless a draw has."""
        if self._restored is not None and isinstance(self._given, RepeatingLoader):
            # A RepeatingLoader started its epoch when the engine was built, before the restore.
            self._given.data_iter = iter(self._given.loader)
            if self._is_behind:
                self._replay()
        # A pipeline draws its batches later, and still needs ``_restored``: see ``draw_from``.
        if not self._engine.pipeline_parallelism:
            self._set_rng_once()
            self._restored = None

    def draw_from(self, given: Any) -> Any:
        """The iterator for ``train_batch`` instead of ``given``; wraps the script's iterators to count items."""
        iterator = given if given is not None else self._engine.data_iterator
        # The engine's own loader is observed through its class.
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
        """Stops observing the engine's loader and the script's iterator."""
        if self._counting is not None and self._engine.data_iterator is self._counting:
            self._engine.data_iterator = self._counting.wrapped
        if self._loader is not None:
            self._loader.__class__ = self._loader_class

    @property
    def _num_samples(self) -> int:
        """The number of samples that all ranks draw at a time."""
        return int(self._engine.train_micro_batch_size_per_gpu()) * int(self._engine.dp_world_size)

    def _drawn_here(self, drawn: int, samples: int) -> int:
        number, rest = divmod(drawn * samples, self._num_samples)
        if rest:
            raise MismatchError(
                f"the snapshot was taken after {drawn * samples} samples, which is no multiple of the "
                f"{self._num_samples} that this layout draws at a time (train_micro_batch_size_per_gpu times "
                "replicas): choose a micro-batch size that divides them, or, if the script passes an iterator to "
                "train_batch, register an object named data that restores the position (ftckpt.deepspeed.register)"
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
            self.log("data: the registered object restores the position of the iterator passed to train_batch")
            return
        self.log(f"data: skipping {number} items, already drawn, of the iterator passed to train_batch")
        for index in range(number):
            try:
                # Through the counter: skipped items count as drawn.
                next(items)
            except StopIteration:
                raise ConfigError(
                    f"data: the iterator passed to train_batch ends after {index} of the {number} items to skip; "
                    "register an object that restores the position (ftckpt.deepspeed.register)"
                ) from None
            if first is not None and items.first != first:
                raise ConfigError(
                    "data: the iterator passed to train_batch does not start with the first item of the job, so the "
                    f"{number} items to skip are not those already drawn; start it with that item, or register an "
                    "object named data that restores the position (ftckpt.deepspeed.register)"
                )
        self._rng_is_set = False  # drawing items may have consumed random numbers

    def _follow_loader(self) -> None:
        """Gives the loader a subclass of its own, because ``iter`` and ``next`` look up methods in the class only.

        Copies and pickles of the loader have the original class.
        """
        begin, draw, base = self._begin_epoch, self._draw, self._loader_class

        def reduce(loader: Any, protocol: Any) -> Any:
            _, (_, *arguments), *state = base.__reduce_ex__(loader, protocol)
            return base.__new__, (base, *arguments), *state

        methods = {"__iter__": lambda loader: begin(), "__next__": lambda loader: draw(), "__reduce_ex__": reduce}
        self._loader.__class__ = type(base.__name__, (base,), methods)

    def _begin_epoch(self) -> Any:
        """Implements ``iter`` of the loader."""
        self.draws()
        if self._restored is not None and self._begin_restored():
            return self._loader
        # Before the loader's own ``iter``, which draws the workers' seed.
        self._epoch = Epoch(save_generators(), _sampler_epoch(self._loader))
        return self._loader_class.__iter__(self._loader)

    def _draw(self) -> Any:
        """Implements ``next`` of the loader."""
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
        # After the draw: a failed batch does not count.
        epoch.drawn += 1
        return batch

    def _begin_restored(self) -> bool:
        """Starts an epoch; returns whether it is the restored one, which the first draw replays.

        Until something is trained, a script that has drawn a batch only to inspect it restarts the same epoch. A
        script that starts an epoch twice without a draw in between did so in the uninterrupted run as well.
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
        """Starts the restored epoch again and skips the batches already drawn."""
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
            self.log(f"data: skipping {epoch.drawn} batches, already drawn, of this epoch")
            assert epoch.first is not None, "what was drawn was preceded by a first draw"
            load_generators(epoch.first)
        for _ in range(epoch.drawn):
            self._loader_class.__next__(self._loader)


def _nothing(*args: Any) -> None:
    """Default of callbacks that are not set yet."""


def _digest(item: Any) -> str | None:
    """A digest of an item; None if it contains anything but numbers, texts, arrays and tensors."""
    try:
        return xxhash.xxh3_64_hexdigest(encode(item))
    except UnsupportedError:
        return None


def _sampler_epoch(loader: Any) -> Any:
    return getattr(loader.data_sampler, "epoch", None)


def _engine_loader(given: Any) -> Any:
    """The DeepSpeedDataLoader that an engine has created for itself, or None."""
    loader = given.loader if isinstance(given, RepeatingLoader) else given
    return loader if isinstance(loader, DeepSpeedDataLoader) else None
