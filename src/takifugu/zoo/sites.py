"""The data sets' own sites: which files lie there, and what proves that one got the right ones.

ImageNet is not here: it is given to registered people only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """A file that a data set needs."""

    name: str
    """Below the data set's folder."""
    inside: str = ""
    """Its name in the archive; nothing for what is only compressed."""
    sha256: str = ""
    """Of the file itself; nothing where nobody has published it."""


@dataclass(frozen=True)
class Parcel:
    """One file at the site, and what is in it."""

    url: str
    checksum: str
    """Of the file at the site, as published: "md5:..." or "sha256:...". Nothing: the members' must do."""
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Site:
    folder: str
    """Below the data folder."""
    parcels: tuple[Parcel, ...]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(member.name for parcel in self.parcels for member in parcel.members)


def _packed(base: str, checksums: dict[str, tuple[str, str]]) -> tuple[Parcel, ...]:
    """Files that are compressed one by one: the published MD5 of the .gz, the SHA-256 of the content."""
    return tuple(
        Parcel(f"{base}/{name}.gz", f"md5:{md5}", (Member(name, sha256=sha256),))
        for name, (md5, sha256) in checksums.items()
    )


_CIFAR_SHA256 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}

SITES: dict[str, Site] = {
    # The MD5 stands on the authors' page.
    "cifar10": Site(
        "cifar-10-batches-bin",
        (
            Parcel(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "md5:c32a1d4ab5d03f1284b67883e8d87530",
                tuple(
                    Member(name, f"cifar-10-batches-bin/{name}", sha256)
                    for name, sha256 in _CIFAR_SHA256.items()
                ),
            ),
        ),
    ),
    # The mirror and the MD5s that torchvision uses; the author's own server turns programs away.
    "mnist": Site(
        "mnist",
        _packed(
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            {
                "train-images-idx3-ubyte": (
                    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                ),
                "train-labels-idx1-ubyte": (
                    "d53e105ee54ea40749a09fcbcd1e9432",
                    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                ),
                "t10k-images-idx3-ubyte": (
                    "9fb629c4189551a2d022fa330f9573f3",
                    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                ),
                "t10k-labels-idx1-ubyte": (
                    "ec29112dd5afa0611ce80d1b7f02629c",
                    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
                ),
            },
        ),
    ),
    # The MD5s stand in the authors' repository. Their S3 site speaks plain HTTP only: the checksums matter.
    "fashion-mnist": Site(
        "fashion-mnist",
        _packed(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            {
                "train-images-idx3-ubyte": (
                    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                ),
                "train-labels-idx1-ubyte": (
                    "25c81989df183df01b3e8a0aad5dffbe",
                    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                ),
                "t10k-images-idx3-ubyte": (
                    "bef4ecab320f06d8554ea6380940ec79",
                    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                ),
                "t10k-labels-idx1-ubyte": (
                    "bb300cfdad3c16e7a12a480ee83cd310",
                    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
                ),
            },
        ),
    ),
    # The page of the data set's first author; the first address (research.metamind.io on S3) answers no more.
    # The MD5 is torchtext's. The files with these SHA-256s have the SHA-1s that GluonNLP published.
    "wikitext-2": Site(
        "wikitext-2",
        (
            Parcel(
                "https://wikitext.smerity.com/wikitext-2-v1.zip",
                "md5:542ccefacc6c27f945fb54453812b3cd",
                (
                    Member(
                        "train.txt",
                        "wikitext-2/wiki.train.tokens",
                        "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
                    ),
                    Member(
                        "valid.txt",
                        "wikitext-2/wiki.valid.tokens",
                        "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
                    ),
                    Member(
                        "test.txt",
                        "wikitext-2/wiki.test.tokens",
                        "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
                    ),
                ),
            ),
        ),
    ),
    # The MD5s are torchtext's for these very addresses. No published checksums of the content were found, and
    # copies that are handed around differ in places: the archives' checksums are all that is compared.
    "multi30k": Site(
        "multi30k",
        _packed(
            "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw",
            {
                "train.en": ("0065d13af80720a55ca8153d126e6627", ""),
                "train.de": ("81ff90b99829c0cd4b1b587d394afd39", ""),
                "val.en": ("2b69aa9253948ac9f67e94917272dd40", ""),
                "val.de": ("6e0e229eb049e3fc99a1ef02fb2d5f91", ""),
                "test_2016_flickr.en": ("ff2c0fcb4893a13bd73414306bc250ae", ""),
                "test_2016_flickr.de": ("efd67d314d98489b716b145475101932", ""),
            },
        ),
    ),
}
