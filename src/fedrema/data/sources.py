"""The public datasets: their files, checksums and download addresses."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SourceFile:
    """One file of a dataset; size and checksum are those of its decompressed content."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """A dataset that consists of files.

    `idx` datasets are pairs of (images, labels) files, each optionally gzipped; `rows` datasets are files of rows (one
    label byte, then the pixels), optionally inside one `archive`.
    """

    name: str
    layout: Literal["idx", "rows"]
    folders: tuple[str, ...]
    """Possible subfolders of a data folder; the first is the target of downloads."""
    files: tuple[SourceFile, ...]
    address: str
    """The publisher's web folder, with a trailing slash."""
    samples: int
    shape: tuple[int, int, int]
    archive: str | None = None
    classes: int = 10

    def downloads(self) -> tuple[str, ...]:
        """Return the names of the files to download."""
        if self.archive is not None:
            return (self.archive,)
        return tuple(f"{file.name}.gz" for file in self.files)


def _idx(name: str, folders: tuple[str, ...], address: str, digests: tuple[str, str, str, str]) -> Source:
    names = (
        ("train-images-idx3-ubyte", 16 + 60_000 * 784),
        ("train-labels-idx1-ubyte", 8 + 60_000),
        ("t10k-images-idx3-ubyte", 16 + 10_000 * 784),
        ("t10k-labels-idx1-ubyte", 8 + 10_000),
    )
    files = tuple(SourceFile(*named, digest) for named, digest in zip(names, digests, strict=True))
    return Source(name, "idx", folders, files, address, samples=70_000, shape=(1, 28, 28))


MNIST = _idx(
    "mnist",
    ("mnist", "MNIST/raw"),
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)

FMNIST = _idx(
    "fmnist",
    ("fashion-mnist", "fmnist", "FashionMNIST/raw"),
    # The publisher's repository has the same files as its storage bucket, which does not support https.
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)

CIFAR10 = Source(
    "cifar10",
    "rows",
    ("cifar-10-batches-bin", "cifar10"),
    tuple(
        SourceFile(name, 10_000 * 3073, digest)
        for name, digest in (
            ("data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
            ("data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
            ("data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
            ("data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
            ("data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
            ("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
        )
    ),
    "https://www.cs.toronto.edu/~kriz/",
    samples=60_000,
    shape=(3, 32, 32),
    archive="cifar-10-binary.tar.gz",
)

SOURCES: dict[str, Source] = {source.name: source for source in (MNIST, FMNIST, CIFAR10)}
