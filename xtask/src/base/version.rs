//! Versions that PROVENANCE, the machine and the PTX all speak of: of the PTX language, of CUDA, and the major of LLVM.

use std::fmt;

use serde::{Serialize, Serializer};

/// A major version of LLVM, such as 22.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct LlvmMajor(pub u32);

impl fmt::Display for LlvmMajor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A version of the PTX language, such as 8.5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PtxIsa {
    /// Before the dot.
    pub major: u32,
    /// After the dot.
    pub minor: u32,
}

impl PtxIsa {
    /// The version `major.minor`.
    pub const fn new(major: u32, minor: u32) -> Self {
        PtxIsa { major, minor }
    }

    /// Reads `<digits>.<digits>`.
    pub fn parse(text: &str) -> Option<Self> {
        let (major, minor) = dotted(text)?;
        Some(PtxIsa { major, minor })
    }
}

impl fmt::Display for PtxIsa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Serialize for PtxIsa {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A version of CUDA, of a toolkit or of what a driver supports, such as 12.4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CudaVersion {
    /// Before the dot.
    pub major: u32,
    /// After the dot.
    pub minor: u32,
}

impl CudaVersion {
    /// Reads `<digits>.<digits>`.
    pub fn parse(text: &str) -> Option<Self> {
        let (major, minor) = dotted(text)?;
        Some(CudaVersion { major, minor })
    }

    /// The highest PTX version that this CUDA accepts: of the last row of the table that is not later. `None` before
    /// the table starts.
    ///
    /// For a CUDA later than the table it is a lower bound.
    pub fn max_ptx(self) -> Option<PtxIsa> {
        let rows = PTX_OF_CUDA.iter().rev();
        rows.map(|((major, minor), ptx)| (CudaVersion { major: *major, minor: *minor }, *ptx))
            .find(|(cuda, _)| *cuda <= self)
            .map(|(_, ptx)| PtxIsa::new(ptx.0, ptx.1))
    }

    /// Says whether the table ends before this version.
    pub fn is_later_than_known(self) -> bool {
        PTX_OF_CUDA.last().is_some_and(|((major, minor), _)| (self.major, self.minor) > (*major, *minor))
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Serialize for CudaVersion {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A version before and after its dot.
type Pair = (u32, u32);

/// CUDA release to the PTX version that it introduced. A table, since the two are not proportional: 12.5 and 12.6 are
/// both PTX 8.5. Source: the release notes in NVIDIA's "PTX ISA" document.
static PTX_OF_CUDA: &[(Pair, Pair)] = &[
    ((10, 0), (6, 3)),
    ((10, 1), (6, 4)),
    ((10, 2), (6, 5)),
    ((11, 0), (7, 0)),
    ((11, 1), (7, 1)),
    ((11, 2), (7, 2)),
    ((11, 3), (7, 3)),
    ((11, 4), (7, 4)),
    ((11, 5), (7, 5)),
    ((11, 6), (7, 6)),
    ((11, 7), (7, 7)),
    ((11, 8), (7, 8)),
    ((12, 0), (8, 0)),
    ((12, 1), (8, 1)),
    ((12, 2), (8, 2)),
    ((12, 3), (8, 3)),
    ((12, 4), (8, 4)),
    ((12, 5), (8, 5)),
    ((12, 6), (8, 5)),
    ((12, 7), (8, 6)),
    ((12, 8), (8, 7)),
    ((12, 9), (8, 8)),
    ((13, 0), (9, 0)),
    ((13, 1), (9, 1)),
    ((13, 2), (9, 2)),
    ((13, 3), (9, 3)),
    ((13, 4), (9, 4)),
    ((13, 5), (9, 5)),
];

/// Predicts whether a driver can load PTX of `version`.
///
/// # Errors
/// One sentence with the name of the CUDA error that a load would give.
pub fn loads_on(version: PtxIsa, driver: CudaVersion) -> Result<(), String> {
    match driver.max_ptx() {
        Some(max) if version <= max || driver.is_later_than_known() => Ok(()),
        Some(max) => Err(format!(
            "the driver supports CUDA {driver}, which accepts PTX up to {max}; PTX {version} would fail with \
             CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
        )),
        None => Err(format!(
            "the driver supports CUDA {driver}, older than any that kiln knows; PTX {version} would probably fail with \
             CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
        )),
    }
}

fn dotted(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once('.')?;
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse().ok()).flatten()
    };
    Some((number(major)?, number(minor)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f5_a_driver_too_old_for_the_ptx_is_predicted() {
        assert_eq!(
            loads_on(PtxIsa::new(9, 0), CudaVersion::parse("12.4").unwrap()).unwrap_err(),
            "the driver supports CUDA 12.4, which accepts PTX up to 8.4; PTX 9.0 would fail with \
             CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
        );
        loads_on(PtxIsa::new(7, 1), CudaVersion::parse("12.4").unwrap()).unwrap();
        loads_on(PtxIsa::new(9, 0), CudaVersion::parse("13.0").unwrap()).unwrap();
        loads_on(PtxIsa::new(9, 9), CudaVersion::parse("14.1").unwrap()).unwrap();
        assert!(loads_on(PtxIsa::new(7, 1), CudaVersion::parse("9.2").unwrap()).is_err());
    }

    #[test]
    fn f6_the_map_from_cuda_to_ptx_is_a_table() {
        let max = |cuda: &str| CudaVersion::parse(cuda).unwrap().max_ptx().unwrap().to_string();
        assert_eq!(
            [max("12.5"), max("12.6"), max("12.8"), max("13.0"), max("11.5")],
            ["8.5", "8.5", "8.7", "9.0", "7.5"]
        );
        assert!(PTX_OF_CUDA.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1));
        assert!(CudaVersion::parse("13.9").unwrap().is_later_than_known());
    }
}
