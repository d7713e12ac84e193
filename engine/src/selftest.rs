//! `kiln selftest`: proves that every home of the kernels computes the same bits.
//!
//! A scalar reference that shares no code with the walks (`reference.rs`) is compared with every registered [`Runner`]
//! over many shapes and data sets (`cases.rs`), bit for bit. Speed is not measured here.

mod cases;
mod defect;
mod reference;

use std::error::Error;
use std::fmt;
use std::io::{self, Write};
use std::str::FromStr;

use kiln_kernels::{Host, HostLanes, Q8_0_BYTES, Q8_0Row, Q8Activations, q8_0_row, quantize_q8, rms_norm};

pub use defect::{DEFECTS, defective};

use crate::backend::{Backend, LoadOptions};
use crate::model::Model;

/// What a [`Runner`] reports when it could not compute.
pub type RunError = Box<dyn Error + Send + Sync>;

/// A home of the kernels: something that computes them and may be compared.
pub trait Runner {
    /// How the table calls it, such as `cpu` or `cuda:0`.
    fn name(&self) -> &str;

    /// `out[r]` = q8_0 row `r` times the activations: `rows` of `scales.len()` blocks of 34 bytes, back to back.
    ///
    /// Lengths: `weights` is `out.len() * scales.len() * 34`, `quants` is `scales.len() * 32`.
    fn q8_0_rows(
        &mut self,
        weights: &[u8],
        quants: &[i8],
        scales: &[f32],
        out: &mut [f32],
    ) -> Result<(), RunError>;

    /// `out` = the rms norm of each row of `x`; a row is as long as `weight`, `out` as long as `x`.
    fn rms_norm(&mut self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> Result<(), RunError>;

    /// Quantises `x` into `quants` (as long) and `scales` (one for each 32 values).
    fn quantize_q8(&mut self, x: &[f32], quants: &mut [i8], scales: &mut [f32]) -> Result<(), RunError>;
}

/// A kind of device that a binary was built with, by which `--device` finds it.
pub trait DeviceKind {
    /// The word before the colon: `cuda` in `cuda:1`.
    fn name(&self) -> &'static str;

    /// Opens device `index`.
    ///
    /// # Errors
    /// There is no such device, or it cannot be used; the message names what is missing.
    fn open(&self, index: usize) -> Result<Box<dyn Runner>, RunError>;

    /// Loads a model on device `index`.
    ///
    /// # Errors
    /// There is no such device, the model does not fit it, or this kind of device only runs the self-test.
    fn load(&self, index: usize, model: Model, options: &LoadOptions) -> Result<Box<dyn Backend>, RunError> {
        let _ = (index, model, options);
        Err(format!("{} devices only run the self-test so far", self.name()).into())
    }
}

/// A device as `--device` names it: `cpu`, `cuda`, `cuda:1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceName {
    /// The kind, such as `cpu` or `cuda`.
    pub kind: String,
    /// Which one of its kind.
    pub index: usize,
}

/// A device name that does not parse.
#[derive(Debug, thiserror::Error)]
#[error("`{found}` is not a device: expected KIND or KIND:NUMBER, such as cpu or cuda:1")]
pub struct BadDeviceName {
    found: String,
}

impl FromStr for DeviceName {
    type Err = BadDeviceName;

    fn from_str(text: &str) -> Result<Self, BadDeviceName> {
        let bad = || BadDeviceName { found: text.to_owned() };
        let (kind, index) = match text.split_once(':') {
            // No sign, no spaces: `parse` alone would take "+1".
            Some((kind, index)) if index.bytes().all(|b| b.is_ascii_digit()) => {
                (kind, index.parse().map_err(|_| bad())?)
            }
            Some(_) => return Err(bad()),
            None => (text, 0),
        };
        if kind.is_empty() || !kind.bytes().all(|b| b.is_ascii_lowercase()) {
            return Err(bad());
        }
        Ok(Self { kind: kind.to_owned(), index })
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind, self.index)
    }
}

/// Why a self-test gave no verdict.
#[derive(Debug, thiserror::Error)]
pub enum SelftestError {
    /// The binary was built without that kind of device.
    #[error("this kiln was built without `{asked}` devices; it has: {}", known.join(", "))]
    UnknownKind {
        /// The kind that was asked for.
        asked: String,
        /// The kinds that there are.
        known: Vec<String>,
    },
    /// The device cannot be used.
    #[error("device {device} cannot be used: {reason}")]
    Device {
        /// The device that was asked for.
        device: DeviceName,
        /// What is missing.
        reason: RunError,
    },
    /// No such defect.
    #[error("there is no defect `{0}` to seed; there are: {names}", names = DEFECTS.join(", "))]
    UnknownDefect(String),
    /// The table could not be written.
    #[error("cannot write the table: {0}")]
    Write(#[from] io::Error),
}

/// How many comparisons passed and failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// Comparisons with no differing bit.
    pub passed: usize,
    /// Comparisons with a differing bit, or that could not be made.
    pub failed: usize,
}

impl Verdict {
    /// Something was compared and nothing differed.
    pub fn is_success(self) -> bool {
        self.failed == 0 && self.passed > 0
    }
}

/// The runners that `device` asks for: the CPU always, and the device if it is another.
///
/// # Errors
/// [`SelftestError::UnknownKind`] or [`SelftestError::Device`].
pub fn runners(
    device: &DeviceName,
    kinds: &[&dyn DeviceKind],
) -> Result<Vec<Box<dyn Runner>>, SelftestError> {
    let mut runners: Vec<Box<dyn Runner>> = vec![Box::new(Cpu)];
    if device.kind == "cpu" {
        if device.index != 0 {
            let reason = "there is one CPU device, cpu:0".into();
            return Err(SelftestError::Device { device: device.clone(), reason });
        }
        return Ok(runners);
    }
    let Some(kind) = kinds.iter().find(|kind| kind.name() == device.kind) else {
        let known = std::iter::once("cpu").chain(kinds.iter().map(|kind| kind.name()));
        return Err(SelftestError::UnknownKind {
            asked: device.kind.clone(),
            known: known.map(str::to_owned).collect(),
        });
    };
    let open = kind.open(device.index);
    runners.push(open.map_err(|reason| SelftestError::Device { device: device.clone(), reason })?);
    Ok(runners)
}

/// Compares every runner with the reference over all cases, writes a table to `out` and the verdict as its last line.
///
/// A row of the table is one operation and shape over all its data sets. A runner's error fails its row.
///
/// # Errors
/// [`SelftestError::Write`].
pub fn compare(runners: &mut [Box<dyn Runner>], out: &mut dyn Write) -> Result<Verdict, SelftestError> {
    let mut verdict = Verdict { passed: 0, failed: 0 };
    writeln!(
        out,
        "{:<12} {:<14} {:<14} {:>9} {:>9} {:>10}",
        "runner", "operation", "shape", "elements", "differing", "max ulp"
    )?;
    for group in cases::all() {
        let cases: Vec<_> = group.cases().collect();
        for runner in runners.iter_mut() {
            let mut tally = Tally::default();
            for case in &cases {
                case.compare(runner.as_mut(), &mut tally);
            }
            writeln!(
                out,
                "{:<12} {:<14} {:<14} {:>9} {:>9} {:>10}",
                runner.name(),
                group.operation(),
                group.shape(),
                tally.elements,
                tally.differing,
                tally.max_ulp
            )?;
            if let Some(first) = &tally.first {
                writeln!(out, "  first: {first}")?;
            }
            if tally.is_clean() {
                verdict.passed += 1;
            } else {
                verdict.failed += 1;
            }
        }
    }
    writeln!(out, "selftest: {} passed, {} failed", verdict.passed, verdict.failed)?;
    Ok(verdict)
}

/// What a row of the table counts.
#[derive(Debug, Default)]
struct Tally {
    elements: usize,
    /// Elements of which any bit differs.
    differing: usize,
    /// The largest distance in units in the last place.
    max_ulp: u32,
    /// The first difference or error.
    first: Option<String>,
    broken: bool,
}

impl Tally {
    fn is_clean(&self) -> bool {
        !self.broken && self.differing == 0 && self.elements > 0
    }

    fn error(&mut self, case: &str, error: &dyn fmt::Display) {
        self.broken = true;
        self.first.get_or_insert_with(|| format!("{case}: {error}"));
    }

    fn floats(&mut self, case: &str, want: &[f32], got: &[f32]) {
        for (i, (want, got)) in want.iter().zip(got).enumerate() {
            self.elements += 1;
            if want.to_bits() != got.to_bits() {
                self.differing += 1;
                self.max_ulp = self.max_ulp.max(ulps(*want, *got));
                self.first.get_or_insert_with(|| {
                    format!(
                        "{case}, element {i}: expected {want:?} ({:#010x}), got {got:?} ({:#010x})",
                        want.to_bits(),
                        got.to_bits()
                    )
                });
            }
        }
    }

    fn bytes(&mut self, case: &str, want: &[i8], got: &[i8]) {
        for (i, (want, got)) in want.iter().zip(got).enumerate() {
            self.elements += 1;
            if want != got {
                self.differing += 1;
                self.max_ulp = self.max_ulp.max(u32::from(want.abs_diff(*got)));
                self.first.get_or_insert_with(|| format!("{case}, byte {i}: expected {want}, got {got}"));
            }
        }
    }
}

/// How many f32 lie between the two, ±0 being one apart; `u32::MAX` if just one is a NaN.
fn ulps(a: f32, b: f32) -> u32 {
    let place = |x: f32| {
        let bits = i64::from(x.to_bits() & 0x7fff_ffff);
        if x.is_sign_negative() { -1 - bits } else { bits }
    };
    if a.is_nan() != b.is_nan() {
        return u32::MAX;
    }
    u32::try_from(place(a).abs_diff(place(b))).unwrap_or(u32::MAX)
}

/// The walks on the host, all lanes in one loop that the compiler vectorises.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cpu;

impl Runner for Cpu {
    fn name(&self) -> &str {
        "cpu"
    }

    fn q8_0_rows(
        &mut self,
        weights: &[u8],
        quants: &[i8],
        scales: &[f32],
        out: &mut [f32],
    ) -> Result<(), RunError> {
        let x = Q8Activations::new(quants, scales).ok_or("activations are not whole blocks")?;
        for (bytes, out) in weights.chunks(scales.len() * Q8_0_BYTES).zip(out) {
            let row = Q8_0Row::new(bytes).ok_or("a row is not whole blocks")?;
            *out = q8_0_row(HostLanes, row, x);
        }
        Ok(())
    }

    fn rms_norm(&mut self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> Result<(), RunError> {
        for (x, out) in x.chunks(weight.len()).zip(out.chunks_mut(weight.len())) {
            rms_norm(HostLanes, x, weight, eps, |i, value| out[i] = value);
        }
        Ok(())
    }

    fn quantize_q8(&mut self, x: &[f32], quants: &mut [i8], scales: &mut [f32]) -> Result<(), RunError> {
        quantize_q8(Host, x, quants, scales);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(mut runners: Vec<Box<dyn Runner>>) -> (Verdict, String) {
        let mut text = Vec::new();
        let verdict = compare(&mut runners, &mut text).expect("a Vec takes any write");
        (verdict, String::from_utf8(text).expect("the table is text"))
    }

    #[test]
    fn the_cpu_has_the_bits_of_the_reference() {
        let (verdict, text) = run(vec![Box::new(Cpu)]);
        assert!(verdict.is_success(), "{text}");
        let last = format!("selftest: {} passed, 0 failed\n", verdict.passed);
        assert!(text.ends_with(&last), "{text}");
        assert!(verdict.passed >= 30, "{text}");
    }

    #[test]
    fn every_seeded_defect_fails_and_is_shown() {
        for name in DEFECTS {
            let (verdict, text) = run(vec![Box::new(Cpu), defective(name).expect("a listed defect")]);
            assert!(verdict.failed > 0, "{name} was not noticed\n{text}");
            assert!(!verdict.is_success());
            assert!(text.contains("  first: "), "{text}");
            assert!(text.ends_with(&format!("{} failed\n", verdict.failed)), "{text}");
        }
        assert!(matches!(defective("nothing"), Err(SelftestError::UnknownDefect(_))));
    }

    #[test]
    fn nothing_compared_is_no_success() {
        let (verdict, text) = run(vec![]);
        assert!(!verdict.is_success());
        assert!(text.ends_with("selftest: 0 passed, 0 failed\n"));
    }

    #[test]
    fn a_runner_that_cannot_compute_or_does_not_write_fails_every_row() {
        struct Idle(bool);
        impl Idle {
            fn result(&self) -> Result<(), RunError> {
                if self.0 { Err("out of order".into()) } else { Ok(()) }
            }
        }
        impl Runner for Idle {
            fn name(&self) -> &str {
                "idle"
            }
            fn q8_0_rows(&mut self, _: &[u8], _: &[i8], _: &[f32], _: &mut [f32]) -> Result<(), RunError> {
                self.result()
            }
            fn rms_norm(&mut self, _: &[f32], _: &[f32], _: f32, _: &mut [f32]) -> Result<(), RunError> {
                self.result()
            }
            fn quantize_q8(&mut self, _: &[f32], _: &mut [i8], _: &mut [f32]) -> Result<(), RunError> {
                self.result()
            }
        }
        for fails in [true, false] {
            let (verdict, text) = run(vec![Box::new(Idle(fails))]);
            assert_eq!(verdict.passed, 0, "{text}");
            assert_eq!(text.contains("out of order"), fails);
        }
    }

    #[test]
    fn device_names_parse_strictly() {
        let name = |text: &str| text.parse::<DeviceName>().ok().map(|name| name.to_string());
        assert_eq!(name("cpu").as_deref(), Some("cpu:0"));
        assert_eq!(name("cuda").as_deref(), Some("cuda:0"));
        assert_eq!(name("cuda:12").as_deref(), Some("cuda:12"));
        for bad in [
            "",
            ":",
            "cuda:",
            "cuda:+1",
            "cuda:-1",
            "cuda: 1",
            "cuda:1:2",
            "CUDA",
            "gpu 0",
            "cuda:99999999999999999999",
        ] {
            assert_eq!(name(bad), None, "{bad}");
        }
    }

    #[test]
    fn devices_that_are_not_there_are_named() {
        struct Absent;
        impl DeviceKind for Absent {
            fn name(&self) -> &'static str {
                "cuda"
            }
            fn open(&self, _: usize) -> Result<Box<dyn Runner>, RunError> {
                Err("no card answers".into())
            }
        }
        let message = |text: &str, kinds: &[&dyn DeviceKind]| {
            let device = text.parse().expect("a good name");
            runners(&device, kinds).err().map(|error| error.to_string())
        };
        assert_eq!(message("cpu", &[]), None);
        assert_eq!(
            message("cuda:1", &[]).as_deref(),
            Some("this kiln was built without `cuda` devices; it has: cpu")
        );
        assert_eq!(
            message("metal", &[&Absent]).as_deref(),
            Some("this kiln was built without `metal` devices; it has: cpu, cuda")
        );
        assert_eq!(
            message("cuda:1", &[&Absent]).as_deref(),
            Some("device cuda:1 cannot be used: no card answers")
        );
        assert_eq!(
            message("cpu:1", &[]).as_deref(),
            Some("device cpu:1 cannot be used: there is one CPU device, cpu:0")
        );
    }

    #[test]
    fn ulps_count_steps_between_numbers() {
        assert_eq!(ulps(1.0, 1.0), 0);
        assert_eq!(ulps(1.0, f32::from_bits(1.0f32.to_bits() + 3)), 3);
        assert_eq!(ulps(0.0, -0.0), 1);
        assert_eq!(ulps(f32::from_bits(1), f32::from_bits(0x8000_0001)), 3);
        assert_eq!(ulps(f32::NAN, 1.0), u32::MAX);
    }
}
