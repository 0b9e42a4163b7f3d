"""Samples of masked text: what is hidden, what pairs are, batches as a function of the cursor."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from few_words import document

from shardtrain.data.config import MaskedTextConfig
from shardtrain.data.masked_sources import open_masked
from shardtrain.data.masked_text import FOLLOWS, OTHER, MaskedText
from shardtrain.data.masking import generator, hide, num_predicted
from shardtrain.data.prepare import prepare
from shardtrain.data.sources import DataInfo
from shardtrain.data.tokenizer import ByteTokenizer, load_tokenizer
from shardtrain.data.wordpiece import SPECIAL, Pieces, learn
from shardtrain.errors import DataError

LENGTH, BATCH = 32, 8


@pytest.fixture(scope="module")
def section(tokenizer_file: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory):
    return MaskedTextConfig(
        path=str(text_file),
        tokenizer=str(tokenizer_file),
        sequence_length=LENGTH,
        batch_size=BATCH,
        validation_fraction=0.2,
        cache=str(tmp_path_factory.mktemp("cache")),
    )


def opened(
    section: MaskedTextConfig, *, pairs: bool = True, seed: int = 0, **changes: object
) -> tuple[MaskedText, MaskedText | None, DataInfo]:
    return open_masked(section.model_copy(update=changes), pairs=pairs, seed=seed)


def originals(batch: dict[str, np.ndarray]) -> np.ndarray:
    """The tokens of a batch with nothing hidden."""
    tokens = batch["tokens"].copy()
    for row in range(len(tokens)):
        there = batch["weights"][row] > 0
        tokens[row, batch["predicted"][row, there]] = batch["targets"][row, there]
    return tokens


# -- what is hidden


def test_fifteen_percent_are_hidden_and_80_10_10_of_them(tokenizer_file: Path) -> None:
    """Devlin et al. 2018: the parts of 40,000 choices are within 4 deviations of their shares."""
    pieces = Pieces.of(load_tokenizer(str(tokenizer_file)), whole_words=False)
    inner = generator(1, 2, 3).choice(pieces.ordinary, 398)
    tokens = np.concatenate([[pieces.cls], inner, [pieces.sep]])
    kinds: Counter[str] = Counter()
    places: Counter[int] = Counter()
    for sample in range(700):
        masked = hide(tokens, pieces, 0.15, generator(0, 0, sample), whole_words=False)
        assert len(masked.predicted) == 60 == num_predicted(400, 0.15)
        assert (np.diff(masked.predicted) > 0).all()
        np.testing.assert_array_equal(tokens[masked.predicted], masked.targets)
        others = np.setdiff1d(np.arange(len(tokens)), masked.predicted)
        np.testing.assert_array_equal(masked.tokens[others], tokens[others])
        seen = masked.tokens[masked.predicted]
        assert not np.isin(seen, [pieces.cls, pieces.sep, pieces.pad]).any()
        kinds["mask"] += int((seen == pieces.mask).sum())
        kinds["same"] += int((seen == masked.targets).sum())
        places.update(masked.predicted.tolist())
    total = 700 * 60
    chance = 0.1 / len(pieces.ordinary)  # a random token that is the same one
    for kind, share in (("mask", 0.8), ("same", 0.1 + chance)):
        spread = 4 * np.sqrt(total * share * (1 - share))
        assert abs(kinds[kind] - total * share) < spread, kind
    assert 0 not in places
    assert 399 not in places  # [CLS] and [SEP]
    assert len(places) == 398


def test_whole_words_are_hidden_together(tokenizer_file: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_file))
    pieces = Pieces.of(tokenizer, whole_words=True)
    text = tokenizer.encode([b"sleeping tables whilst chairs sleepers undertables matted"])[0]
    assert pieces.goes_on[text].sum() > 5
    tokens = np.concatenate([[pieces.cls], text, [pieces.sep]])
    begins = np.flatnonzero(~pieces.goes_on[tokens])
    words = {tuple(range(a, b)) for a, b in zip(begins, [*begins[1:], len(tokens)], strict=True)}
    for sample in range(200):
        found = hide(tokens, pieces, 0.3, generator(0, 0, sample), whole_words=True).predicted
        chosen = {word for word in words if set(word) <= set(found.tolist())}
        assert sorted(place for word in chosen for place in word) == found.tolist()
        assert 0 < len(found) <= round(len(tokens) * 0.3)


def test_a_tokenizer_must_be_able_to_hide(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no \[CLS\]"):
        Pieces.of(ByteTokenizer(), whole_words=False)
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(("<s>", "</s>", "<mask>", "<pad>", "a"))}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a")).save(
        str(tmp_path / "tokenizer.json")
    )
    roberta = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert Pieces.of(roberta, whole_words=False).mask == 2
    with pytest.raises(DataError, match="in WordPieces alone"):
        Pieces.of(roberta, whole_words=True)


def test_a_learned_tokenizer_is_the_same_every_time(tokenizer_file: Path) -> None:
    """Two processes that learn from the same text must have the same numbers."""
    again = learn(lambda: map(document, range(100)), 90)
    assert again == tokenizer_file.read_bytes()
    tokenizer = load_tokenizer(str(tokenizer_file))
    assert [tokenizer.vocabulary()[word] for word in SPECIAL] == [0, 1, 2, 3, 4]
    assert (tokenizer.begin, tokenizer.end) == ((2,), (3,))
    assert tokenizer.decode(tokenizer.encode([b"The CAT sat"])[0]) == "the cat sat"


def test_a_tokenizer_is_learned_from_the_text_once(
    section: MaskedTextConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    changed = section.model_copy(update={"tokenizer": "wordpiece:70"})
    info = open_masked(changed, pairs=True, seed=0, say=said.append)[2]
    assert [line for line in said if "learning a tokenizer of 70" in line]
    assert info.tokenizer().vocab_size <= 70
    said.clear()
    open_masked(changed, pairs=True, seed=0, say=said.append)
    assert said == []


# -- pairs


def test_pairs_are_two_parts_of_one_document_or_of_two(section: MaskedTextConfig) -> None:
    data, _, _ = opened(section)
    pieces, tokens = data.pieces, np.asarray(data.tokens)
    text = " ".join(map(str, tokens.tolist()))
    owners = np.searchsorted(data.firsts, np.arange(data.num_samples), side="right") - 1
    labels: Counter[int] = Counter()
    for cursor in range(3 * data.batches_per_epoch):
        batch = data.batch_at(cursor)
        whole = originals(batch)
        for row, sample in enumerate(data.sample_ids(cursor)):
            size = int(batch["segments"][row].sum())
            np.testing.assert_array_equal(batch["segments"][row], np.arange(LENGTH) < size)
            line = whole[row, :size]
            assert (batch["tokens"][row, size:] == pieces.pad).all()
            ends = np.flatnonzero(line == pieces.sep)
            assert line[0] == pieces.cls
            assert ends[-1] == size - 1
            assert len(ends) == 2
            assert (
                batch["parts"][row] == ((np.arange(LENGTH) > ends[0]) & (np.arange(LENGTH) < size))
            ).all()
            first, second = line[1 : ends[0]], line[ends[0] + 1 : -1]
            assert len(first) > 0
            assert len(second) > 0
            assert not pieces.goes_on[second[0]]
            label = int(batch["next"][row])
            labels[label] += 1
            own = tokens[data.starts[owners[sample]] : data.stops[owners[sample]]]
            own_text = f" {' '.join(map(str, own.tolist()))} "
            assert f" {' '.join(map(str, first.tolist()))} " in own_text
            together = " ".join(map(str, [*first.tolist(), *second.tolist()]))
            if label == FOLLOWS:
                assert f" {together} " in own_text
            else:
                assert " ".join(map(str, second.tolist())) in text
            assert batch["next_weights"][row] == 1
            assert batch["weights"][row].sum() == max(1, round(size * 0.15))
    total = sum(labels.values())
    assert abs(labels[OTHER] - total / 2) < 4 * np.sqrt(total / 4)


def test_both_labels_have_parts_of_the_same_length(section: MaskedTextConfig) -> None:
    """Else the length alone would tell the label."""
    data, _, _ = opened(section)
    lengths: dict[int, list[int]] = {FOLLOWS: [], OTHER: []}
    for cursor in range(15 * data.batches_per_epoch):
        batch = data.batch_at(cursor)
        for row in range(BATCH):
            lengths[int(batch["next"][row])].append(int(batch["segments"][row].sum()))
    means = {label: np.mean(found) for label, found in lengths.items()}
    spread = np.std(lengths[FOLLOWS]) * np.sqrt(2 / len(lengths[OTHER]))
    assert abs(means[FOLLOWS] - means[OTHER]) < 4 * spread + 0.5


def test_one_document_makes_no_pairs(section: MaskedTextConfig, tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("the cat sat on a mat " * 200)
    with pytest.raises(DataError, match="one document alone"):
        opened(section, path=str(path), validation_fraction=0.0)
    assert opened(section, pairs=False, path=str(path), validation_fraction=0.0)[0].num_samples > 8


# -- a stream


def test_without_pairs_samples_are_full_and_documents_apart(section: MaskedTextConfig) -> None:
    data, _, _ = opened(section, pairs=False)
    seen = np.zeros(len(data.tokens), int)
    for cursor in range(data.batches_per_epoch):
        batch = data.batch_at(cursor)
        assert "next" not in batch
        whole = originals(batch)
        for row, sample in enumerate(data.sample_ids(cursor)):
            first = sample * LENGTH
            text = np.asarray(data.tokens[first : first + LENGTH])
            size = len(text)
            np.testing.assert_array_equal(whole[row, :size], text)
            seen[first : first + size] += 1
            document = np.searchsorted(data.starts, first + np.arange(size), side="right") - 1
            np.testing.assert_array_equal(batch["segments"][row, :size], 1 + document - document[0])
            assert (batch["segments"][row, size:] == 0).all()
            begin = np.maximum(data.starts[document], first)
            np.testing.assert_array_equal(
                batch["positions"][row, :size], first + np.arange(size) - begin
            )
    assert seen.max() == 1
    assert seen.sum() >= len(seen) - LENGTH * BATCH


# -- batches are a function of the cursor


def test_rows_do_not_depend_on_who_reads_them(section: MaskedTextConfig) -> None:
    data, _, _ = opened(section, seed=5)
    cursor = data.batches_per_epoch + 1
    whole = data.batch_at(cursor)
    parts = [data.rows(cursor, start, start + 2) for start in range(0, BATCH, 2)]
    for name, array in whole.items():
        np.testing.assert_array_equal(array, np.concatenate([part[name] for part in parts]))
    again = opened(section, seed=5)[0].batch_at(cursor)
    for name, array in whole.items():
        np.testing.assert_array_equal(array, again[name])


def test_every_epoch_hides_others(section: MaskedTextConfig) -> None:
    data, _, _ = opened(section, pairs=False, shuffle=False)
    one, two = data.batch_at(0), data.batch_at(data.batches_per_epoch)
    np.testing.assert_array_equal(originals(one), originals(two))
    assert (one["predicted"] != two["predicted"]).mean() > 0.5
    other = opened(section, pairs=False, shuffle=False, seed=1)[0].batch_at(0)
    assert (one["predicted"] != other["predicted"]).mean() > 0.5


def test_an_evaluation_is_always_the_same_with_each_sample_once(section: MaskedTextConfig) -> None:
    """Also of another seed; the last batch is filled up with rows of no weight (O-41)."""
    validation = opened(section, seed=1)[1]
    other = opened(section, seed=2)[1]
    assert validation is not None
    assert other is not None
    count = validation.evaluation_batches(0)
    assert validation.num_samples % BATCH, "the last batch must not be full"
    pairs = 0.0
    for index in range(count):
        one, two = (d.evaluation_rows(index, 0, BATCH) for d in (validation, other))
        for name, array in one.items():
            np.testing.assert_array_equal(array, two[name])
        halves = [validation.evaluation_rows(index, a, a + BATCH // 2) for a in (0, BATCH // 2)]
        for name, array in one.items():
            np.testing.assert_array_equal(array, np.concatenate([h[name] for h in halves]))
        pairs += float(one["next_weights"].sum())
        assert ((one["weights"].sum(1) > 0) == (one["next_weights"] > 0)).all()
    assert pairs == validation.num_samples


def test_prepared_tokens_have_their_tokenizer(section: MaskedTextConfig, tmp_path: Path) -> None:
    """`prepare` learns one too; a config that would learn another is refused."""
    folder = tmp_path / "prepared"
    prepare([section.path], folder, tokenizer="wordpiece:70", validation_fraction=0.2)
    kept = str(folder / "tokenizer.json")
    data = opened(section, path=str(folder), tokenizer=kept)[0]
    assert data.num_samples > BATCH
    with pytest.raises(DataError, match="so is their tokenizer") as refused:
        opened(section, path=str(folder), tokenizer="wordpiece:70")
    assert kept in str(refused.value)


def test_nothing_is_learned_from_tokens(section: MaskedTextConfig, tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(1000, dtype=np.uint16) % 80)
    with pytest.raises(DataError, match="these are tokens already"):
        opened(section, path=str(tmp_path / "tokens.npy"), tokenizer="wordpiece:70")
    with pytest.raises(DataError, match="no number of tokens"):
        opened(section, tokenizer="wordpiece:7")


def test_too_little_text_is_refused(section: MaskedTextConfig) -> None:
    with pytest.raises(DataError, match="too little text"):
        opened(section, batch_size=10_000)


def test_prompts_with_completions_are_refused(section: MaskedTextConfig, tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text('{"prompt": "the cat", "completion": "sat"}\n' * 20)
    with pytest.raises(DataError, match="for models that write"):
        opened(section, path=str(path), validation_fraction=0.0)
