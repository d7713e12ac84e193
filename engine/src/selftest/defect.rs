//! Defects that a self-test must notice: the CPU's walks, each with one plausible mistake.

use kiln_kernels::{
    Arith, Host, HostLanes, LANES, Lanes, Q8_0_BYTES, Q8_0Row, Q8Activations, q8_0_row, rms_norm,
};

use super::{Cpu, RunError, Runner, SelftestError};

/// Names of the defects.
pub const DEFECTS: &[&str] = &["lane-order", "unfused", "flush-denormals", "ties-away", "last-row"];

/// A runner with the defect `name`.
///
/// # Errors
/// [`SelftestError::UnknownDefect`].
pub fn defective(name: &str) -> Result<Box<dyn Runner>, SelftestError> {
    match DEFECTS.iter().find(|known| **known == name) {
        Some(name) => Ok(Box::new(Defective { name, label: format!("+{name}") })),
        None => Err(SelftestError::UnknownDefect(name.to_owned())),
    }
}

struct Defective {
    name: &'static str,
    label: String,
}

/// Host arithmetic with a mistake in it.
#[derive(Clone, Copy)]
struct Faulty {
    /// A product and a sum, two roundings, where the walk says one.
    unfused: bool,
    /// Denormal products become zero.
    flush: bool,
}

impl Arith for Faulty {
    fn add(self, a: f32, b: f32) -> f32 {
        Host.add(a, b)
    }
    fn sub(self, a: f32, b: f32) -> f32 {
        Host.sub(a, b)
    }
    fn mul(self, a: f32, b: f32) -> f32 {
        let product = Host.mul(a, b);
        if self.flush && product.is_subnormal() { 0.0 } else { product }
    }
    fn fma(self, a: f32, b: f32, c: f32) -> f32 {
        if self.unfused { a * b + c } else { Host.fma(a, b, c) }
    }
    fn div(self, a: f32, b: f32) -> f32 {
        Host.div(a, b)
    }
    fn sqrt(self, a: f32) -> f32 {
        Host.sqrt(a)
    }
    fn dot4(self, a: [i8; 4], b: [i8; 4], acc: i32) -> i32 {
        Host.dot4(a, b, acc)
    }
}

/// Host lanes over faulty arithmetic.
#[derive(Clone, Copy)]
struct FaultyLanes {
    arith: Faulty,
    /// Adds the lanes one after the other.
    in_sequence: bool,
}

impl Lanes for FaultyLanes {
    type Arith = Faulty;
    type Partials = [f32; LANES];

    fn arith(self) -> Faulty {
        self.arith
    }
    fn splat(self, value: f32) -> [f32; LANES] {
        HostLanes.splat(value)
    }
    fn update(self, partials: &mut [f32; LANES], step: impl FnMut(usize, f32) -> f32) {
        HostLanes.update(partials, step);
    }
    fn for_each(self, step: impl FnMut(usize)) {
        HostLanes.for_each(step);
    }
    fn sum(self, partials: [f32; LANES]) -> f32 {
        if self.in_sequence { partials.iter().sum() } else { HostLanes.sum(partials) }
    }
}

impl Defective {
    fn lanes(&self) -> FaultyLanes {
        FaultyLanes {
            arith: Faulty { unfused: self.name == "unfused", flush: self.name == "flush-denormals" },
            in_sequence: self.name == "lane-order",
        }
    }
}

impl Runner for Defective {
    fn name(&self) -> &str {
        &self.label
    }

    fn q8_0_rows(
        &mut self,
        weights: &[u8],
        quants: &[i8],
        scales: &[f32],
        out: &mut [f32],
    ) -> Result<(), RunError> {
        let x = Q8Activations::new(quants, scales).ok_or("activations are not whole blocks")?;
        // `last-row`: a launch one row short.
        let rows = out.len() - usize::from(self.name == "last-row" && out.len() > 1);
        for (bytes, out) in weights.chunks(scales.len() * Q8_0_BYTES).zip(&mut out[..rows]) {
            let row = Q8_0Row::new(bytes).ok_or("a row is not whole blocks")?;
            *out = q8_0_row(self.lanes(), row, x);
        }
        Ok(())
    }

    fn rms_norm(&mut self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> Result<(), RunError> {
        for (x, out) in x.chunks(weight.len()).zip(out.chunks_mut(weight.len())) {
            rms_norm(self.lanes(), x, weight, eps, |i, value| out[i] = value);
        }
        Ok(())
    }

    fn quantize_q8(&mut self, x: &[f32], quants: &mut [i8], scales: &mut [f32]) -> Result<(), RunError> {
        Cpu.quantize_q8(x, quants, scales)?;
        if self.name == "ties-away" {
            for (i, quant) in quants.iter_mut().enumerate().filter(|(i, _)| x[*i].is_finite()) {
                let scale = scales[i / kiln_kernels::Q8_BLOCK];
                *quant = if scale > 0.0 { (x[i] * (1.0 / scale)).round() as i8 } else { 0 };
            }
        }
        Ok(())
    }
}
