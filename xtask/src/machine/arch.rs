//! GPU architectures: a strict grammar, a table of those that exist, and the chosen llc as the oracle.
//!
//! llc itself accepts anything: a misspelt `-mcpu` exits 0 and writes PTX of an old version with the bad text as its
//! `.target`. So a text becomes an [`Arch`] here or is refused, before any compile.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::base::env::Env;
use crate::base::process::PROBE_LIMIT;
use crate::base::version::PtxIsa;
use crate::machine::probe;
use crate::report::error::{Error, Result};

crate::codes! {
    SPELLING = "KILN-0321", Machine, "not the name of a GPU architecture",
        "An architecture is written sm_<number> with an optional `a` or `f`, all lower case: sm_86, sm_90a, sm_100f. \
         llc takes any other spelling without an error and writes PTX that no driver can use, so it is refused here.";
    UNKNOWN_ARCH = "KILN-0322", Machine, "no such GPU architecture",
        "The name is well spelt, and no such architecture exists, or it has no such `a` or `f` variant: `a` variants \
         exist from sm_90 on, `f` variants from sm_100 on.";
    LLC_TOO_OLD = "KILN-0323", Machine, "the chosen llc does not know the architecture",
        "llc would exit 0 and write PTX of an old version for an architecture that it does not know. Choose a \
         verified llc of a newer LLVM major, or another architecture.";
    CPU_LIST = "KILN-0324", Machine, "llc does not list its architectures",
        "`llc -mtriple=nvptx64-nvidia-cuda -mcpu=help` printed no architecture. It is probably not LLVM's \
         llc, or it was built without nvptx64. Name another with CUDA_OXIDE_LLC.";
}

/// A GPU's compute capability, such as 8.6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Capability {
    /// The generation.
    pub major: u32,
    /// The member of the generation.
    pub minor: u32,
}

impl Capability {
    /// Reads `<digits>.<digits>`, and nothing else.
    pub fn parse(text: &str) -> Option<Self> {
        let (major, minor) = text.split_once('.')?;
        let number = |text: &str| {
            let digits =
                !text.is_empty() && text.len() <= 3 && text.bytes().all(|byte| byte.is_ascii_digit());
            digits.then(|| text.parse().ok()).flatten()
        };
        Some(Capability { major: number(major)?, minor: number(minor)? })
    }

    /// The architecture that fits exactly, without `a` or `f`; `None` when the table has none.
    pub fn arch(self) -> Option<Arch> {
        let base = self.major.checked_mul(10)?.checked_add(self.minor)?;
        (self.minor < 10 && row(base).is_some()).then_some(Arch { base, variant: Variant::Plain })
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Serialize for Capability {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What follows the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Variant {
    /// Nothing: runs on this capability and, through the driver's compiler, on every later one.
    Plain,
    /// `a`: may use features of this one capability; runs nowhere else.
    Specific,
    /// `f`: may use features of its family; runs on later members of the same generation.
    Family,
}

/// A GPU architecture that exists, such as `sm_90a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Arch {
    base: u32,
    variant: Variant,
}

impl Arch {
    /// The number after `sm_`.
    pub fn base(self) -> u32 {
        self.base
    }

    /// The suffix.
    pub fn variant(self) -> Variant {
        self.variant
    }

    /// The capability that it is made for. sm_101 was renamed sm_110, which is the capability of that chip.
    pub fn capability(self) -> Capability {
        let base = renamed(self.base);
        Capability { major: base / 10, minor: base % 10 }
    }

    /// The lowest PTX version that can name it. PTX of a lower version means that llc did not know the name.
    pub fn min_ptx(self) -> PtxIsa {
        let ptx = row(self.base).and_then(|row| row.ptx(self.variant));
        ptx.unwrap_or(PtxIsa::new(1, 0))
    }

    /// Says whether PTX for it runs on a GPU of `capability`, and else why not.
    ///
    /// # Errors
    /// One sentence, without a trailing period.
    pub fn runs_on(self, capability: Capability) -> Result<(), String> {
        let own = self.capability();
        match self.variant {
            Variant::Plain if capability >= own => Ok(()),
            Variant::Plain => {
                Err(format!("{self} needs capability {own} or later, and the GPU has {capability}"))
            }
            Variant::Specific if capability == own => Ok(()),
            Variant::Specific => Err(format!(
                "{self} is locked to capability {own}, and the GPU has {capability}; PTX for an `a` architecture runs \
                 on no other"
            )),
            Variant::Family if capability.major == own.major && capability >= own => Ok(()),
            Variant::Family => Err(format!(
                "{self} runs on its own family, capability {own} and later {}.x, and the GPU has {capability}",
                own.major
            )),
        }
    }

    /// A warning for architectures whose PTX does not run on later GPUs.
    pub fn lock_note(self) -> Option<String> {
        let own = self.capability();
        match self.variant {
            Variant::Plain => None,
            Variant::Specific => {
                Some(format!("{self} is locked to capability {own}: it runs on no other GPU"))
            }
            Variant::Family => {
                Some(format!("{self} is locked to its family: capability {own} and later {}.x", own.major))
            }
        }
    }

    /// Refuses an architecture that the chosen llc does not know.
    ///
    /// # Errors
    /// It is not among `cpus`; the message names the llc and the newest architecture that it knows.
    pub fn require_known_to(self, cpus: &LlcCpus) -> Result<()> {
        if cpus.knows(self) {
            return Ok(());
        }
        let newest = cpus.names.iter().filter_map(|name| number_of(name)).max();
        let listed = match newest {
            Some(newest) if newest < self.base => format!(", whose newest architecture is sm_{newest}"),
            _ => format!(" (its -mcpu=help does not list {self})"),
        };
        let error = Error::new(&LLC_TOO_OLD, format!("{self} is not known to {}{listed}", cpus.llc));
        let other = pair(self.base).map(|base| Arch { base, ..self }).filter(|other| cpus.knows(*other));
        Err(match other {
            Some(other) => error.cause(pair_note()).hint(format!("--arch {other}, for the same chip")),
            None => {
                error.hint("name a verified llc of a newer LLVM major in CUDA_OXIDE_LLC, or another --arch")
            }
        })
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = match self.variant {
            Variant::Plain => "",
            Variant::Specific => "a",
            Variant::Family => "f",
        };
        write!(f, "sm_{}{suffix}", self.base)
    }
}

impl Serialize for Arch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for Arch {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        parse(text, &[])
    }
}

/// Reads an architecture, with suggestions that take the machine's GPUs into account.
///
/// # Errors
/// The spelling is wrong, or there is no such architecture or variant. What was probably meant is in the hint.
pub fn parse(text: &str, gpus: &[Capability]) -> Result<Arch> {
    let Some((base, variant)) = strict(text) else {
        let error = Error::new(
            &SPELLING,
            format!("{text:?} is not an architecture: expected sm_<number>, optionally with `a` or `f`"),
        );
        return Err(error.hint(suggestion(text, gpus)));
    };
    let arch = Arch { base, variant };
    let Some(row) = row(base) else {
        return Err(
            Error::new(&UNKNOWN_ARCH, format!("there is no {arch} that kiln knows")).hint(nearby(base))
        );
    };
    if row.ptx(variant).is_some() {
        return Ok(arch);
    }
    let since = if variant == Variant::Specific {
        "`a` variants start at sm_90"
    } else {
        "`f` variants start at sm_100"
    };
    Err(Error::new(&UNKNOWN_ARCH, format!("{arch} does not exist: {since}"))
        .hint(format!("--arch sm_{base}")))
}

/// The names that one llc knows, asked from it.
#[derive(Clone, Debug)]
pub struct LlcCpus {
    llc: String,
    names: BTreeSet<String>,
}

impl LlcCpus {
    /// Asks `llc`, in the environment of the real call.
    ///
    /// # Errors
    /// It cannot run, or lists no architecture.
    pub fn ask(llc: &Path, env: &Env) -> Result<Self> {
        let output = probe::run(llc, &["-mtriple=nvptx64-nvidia-cuda", "-mcpu=help"], env, PROBE_LIMIT)?;
        // LLVM prints the list on standard error; that may change.
        let cpus = Self::of(&llc.display().to_string(), &format!("{}\n{}", output.stderr, output.stdout));
        if cpus.names.is_empty() {
            let what = format!("{} -mcpu=help lists no sm_ architecture", llc.display());
            return Err(Error::new(&CPU_LIST, what).hint("name LLVM's llc in CUDA_OXIDE_LLC"));
        }
        Ok(cpus)
    }

    /// Reads the output of `-mcpu=help`.
    pub fn of(llc: &str, help: &str) -> Self {
        let words = help.lines().filter_map(|line| line.split_whitespace().next());
        let names = words.filter(|word| strict(word).is_some()).map(str::to_owned).collect();
        LlcCpus { llc: llc.to_owned(), names }
    }

    /// Says whether `arch` is among them.
    pub fn knows(&self, arch: Arch) -> bool {
        self.names.contains(&arch.to_string())
    }
}

/// One architecture: its number and the lowest PTX version of each variant that exists.
struct Row {
    base: u32,
    plain: PtxIsa,
    specific: Option<PtxIsa>,
    family: Option<PtxIsa>,
}

impl Row {
    fn ptx(&self, variant: Variant) -> Option<PtxIsa> {
        match variant {
            Variant::Plain => Some(self.plain),
            Variant::Specific => self.specific,
            Variant::Family => self.family,
        }
    }
}

const fn old(base: u32, major: u32, minor: u32) -> Row {
    Row { base, plain: PtxIsa::new(major, minor), specific: None, family: None }
}

const fn new(base: u32, plain: (u32, u32), specific: (u32, u32), family: (u32, u32)) -> Row {
    Row {
        base,
        plain: PtxIsa::new(plain.0, plain.1),
        specific: Some(PtxIsa::new(specific.0, specific.1)),
        family: Some(PtxIsa::new(family.0, family.1)),
    }
}

/// What exists, from sm_50 on, with the `.version` that llc 22.1.8 and 23.1.4 write for each. llc 21 lacks sm_88 and
/// sm_110.
static TABLE: &[Row] = &[
    old(50, 4, 0),
    old(52, 4, 1),
    old(53, 4, 2),
    old(60, 5, 0),
    old(61, 5, 0),
    old(62, 5, 0),
    old(70, 6, 0),
    old(72, 6, 1),
    old(75, 6, 3),
    old(80, 7, 0),
    old(86, 7, 1),
    old(87, 7, 4),
    old(88, 9, 0),
    old(89, 7, 8),
    Row { base: 90, plain: PtxIsa::new(7, 8), specific: Some(PtxIsa::new(8, 0)), family: None },
    new(100, (8, 6), (8, 6), (8, 8)),
    new(101, (8, 6), (8, 6), (8, 8)),
    new(103, (8, 8), (8, 8), (8, 8)),
    new(110, (9, 0), (9, 0), (9, 0)),
    new(120, (8, 7), (8, 7), (8, 8)),
    new(121, (8, 8), (8, 8), (8, 8)),
];

fn row(base: u32) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.base == base)
}

/// sm_101 is the old name of sm_110.
fn renamed(base: u32) -> u32 {
    if base == 101 { 110 } else { base }
}

fn pair(base: u32) -> Option<u32> {
    match base {
        101 => Some(110),
        110 => Some(101),
        _ => None,
    }
}

fn pair_note() -> &'static str {
    "sm_101 and sm_110 are one chip: PTX 9.0 renamed sm_101 to sm_110, so older tools know only the first name"
}

/// `sm_<n>[a|f]`, without a leading zero.
fn strict(text: &str) -> Option<(u32, Variant)> {
    let rest = text.strip_prefix("sm_")?;
    let (digits, variant) = match (rest.strip_suffix('a'), rest.strip_suffix('f')) {
        (Some(digits), _) => (digits, Variant::Specific),
        (_, Some(digits)) => (digits, Variant::Family),
        _ => (rest, Variant::Plain),
    };
    let number = !digits.is_empty()
        && digits.len() <= 4
        && !digits.starts_with('0')
        && digits.bytes().all(|byte| byte.is_ascii_digit());
    number.then(|| Some((digits.parse().ok()?, variant))).flatten()
}

fn number_of(name: &str) -> Option<u32> {
    strict(name).map(|(base, _)| base)
}

/// What was probably meant by a text that is not an architecture.
fn suggestion(text: &str, gpus: &[Capability]) -> String {
    let text = text.trim();
    if text.is_empty() {
        return format!("name one, such as --arch {}", example(gpus));
    }
    if text.contains([',', ';']) || text.split_whitespace().count() > 1 {
        let parts = text.split(|c: char| c == ',' || c == ';' || c.is_whitespace());
        let flags: Option<Vec<String>> = parts
            .filter(|part| !part.is_empty())
            .map(|part| {
                Some(format!("--arch {}", strict(part).map(|_| part.to_owned()).or_else(|| repaired(part))?))
            })
            .collect();
        return match flags {
            Some(flags) => format!("repeat the flag: {}", flags.join(" ")),
            None => "repeat the flag: --arch sm_86 --arch sm_90".to_owned(),
        };
    }
    if text.eq_ignore_ascii_case("native") {
        let named: BTreeSet<Arch> = gpus.iter().filter_map(|gpu| gpu.arch()).collect();
        return match named.into_iter().next_back() {
            Some(arch) => format!("--arch {arch}, for the GPU of this machine"),
            None => "`cargo xtask doctor` shows the GPU of this machine; name its architecture, such as --arch sm_90"
                .to_owned(),
        };
    }
    match repaired(text) {
        Some(arch) => format!("did you mean --arch {arch}?"),
        None => format!("name one such as --arch {}", example(gpus)),
    }
}

fn example(gpus: &[Capability]) -> String {
    gpus.iter().find_map(|gpu| gpu.arch()).map_or_else(|| "sm_90".to_owned(), |arch| arch.to_string())
}

/// The existing architecture that a misspelt `text` stands for: `SM_86`, `86`, `8.6`, `compute_86`, `sm86`, `sm_086`,
/// full-width digits.
fn repaired(text: &str) -> Option<String> {
    let plain: String = text.chars().filter(|c| !c.is_whitespace()).map(narrow).collect();
    let plain = plain.to_ascii_lowercase();
    let rest = ["compute", "sm", "cc"].iter().find_map(|prefix| plain.strip_prefix(prefix)).unwrap_or(&plain);
    let rest = rest.trim_start_matches(['_', '-', ' ']).trim_start_matches('0');
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    let (number, suffix) = rest.split_at_checked(end)?;
    let digits: String = match number.split_once('.') {
        Some((major, minor)) if minor.len() == 1 => format!("{major}{minor}"),
        Some(_) => return None,
        None => number.to_owned(),
    };
    let arch = format!("sm_{digits}{suffix}");
    let (base, variant) = strict(&arch)?;
    row(base)?.ptx(variant).map(|_| arch)
}

/// The ASCII form of a full-width character.
fn narrow(c: char) -> char {
    match u32::from(c) {
        code @ 0xff01..=0xff5e => char::from_u32(code - 0xfee0).unwrap_or(c),
        _ => c,
    }
}

fn nearby(base: u32) -> String {
    let mut bases: Vec<u32> = TABLE.iter().map(|row| row.base).collect();
    if base < 50 {
        return "kiln knows architectures from sm_50 on; drivers since 580 need sm_75 or later".to_owned();
    }
    bases.sort_by_key(|known| known.abs_diff(base));
    bases.truncate(3);
    bases.sort_unstable();
    let names: Vec<String> = bases.iter().map(|base| format!("sm_{base}")).collect();
    format!("the nearest are {}", names.join(", "))
}

#[cfg(test)]
mod tests;
