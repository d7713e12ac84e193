//! The device's home for walks: one lane a thread, every rounding operation a spelled `.rn` instruction.

use cuda_device::{dotprod, ptx_asm, warp};
use kiln_kernels::{Arith, LANES, Lanes};

/// PTX instructions that round to nearest even and keep denormals.
///
/// `f32::mul_add` and `f32::sqrt` would become libdevice calls and leave the llc path, and plain operators would be right
/// only as long as contraction is off. `register_only` and `may_diverge` let the compiler move and duplicate the
/// instructions: they touch nothing but registers and need no other lane.
#[derive(Clone, Copy)]
pub struct Device;

impl Arith for Device {
    #[inline(always)]
    fn add(self, a: f32, b: f32) -> f32 {
        let d: f32;
        // SAFETY: pure arithmetic on registers.
        unsafe {
            ptx_asm!("add.rn.f32 %0, %1, %2;", out("=f") d, in("f") a, in("f") b, options(register_only, may_diverge));
        }
        d
    }
    #[inline(always)]
    fn sub(self, a: f32, b: f32) -> f32 {
        let d: f32;
        // SAFETY: pure arithmetic on registers.
        unsafe {
            ptx_asm!("sub.rn.f32 %0, %1, %2;", out("=f") d, in("f") a, in("f") b, options(register_only, may_diverge));
        }
        d
    }
    #[inline(always)]
    fn mul(self, a: f32, b: f32) -> f32 {
        let d: f32;
        // SAFETY: pure arithmetic on registers.
        unsafe {
            ptx_asm!("mul.rn.f32 %0, %1, %2;", out("=f") d, in("f") a, in("f") b, options(register_only, may_diverge));
        }
        d
    }
    #[inline(always)]
    fn fma(self, a: f32, b: f32, c: f32) -> f32 {
        let d: f32;
        // SAFETY: pure arithmetic on registers.
        unsafe {
            ptx_asm!(
                "fma.rn.f32 %0, %1, %2, %3;",
                out("=f") d,
                in("f") a,
                in("f") b,
                in("f") c,
                options(register_only, may_diverge)
            );
        }
        d
    }
    #[inline(always)]
    fn div(self, a: f32, b: f32) -> f32 {
        let d: f32;
        // SAFETY: pure arithmetic on registers.
        unsafe {
            ptx_asm!("div.rn.f32 %0, %1, %2;", out("=f") d, in("f") a, in("f") b, options(register_only, may_diverge));
        }
        d
    }
    #[inline(always)]
    fn sqrt(self, a: f32) -> f32 {
        let d: f32;
        // SAFETY: pure arithmetic on registers.
        unsafe {
            ptx_asm!("sqrt.rn.f32 %0, %1;", out("=f") d, in("f") a, options(register_only, may_diverge));
        }
        d
    }
    #[inline(always)]
    fn dot4(self, a: [i8; 4], b: [i8; 4], acc: i32) -> i32 {
        dotprod::dp4a_s32(word(a), word(b), acc)
    }
    #[inline(always)]
    fn f16_to_f32(self, h: u16) -> f32 {
        let d: f32;
        // SAFETY: pure arithmetic on registers. Exact for every half; a NaN's payload is not defined.
        unsafe {
            ptx_asm!("cvt.f32.f16 %0, %1;", out("=f") d, in("h") h, options(register_only, may_diverge));
        }
        d
    }
}

/// Four bytes as a word, the first one lowest.
#[inline(always)]
fn word(bytes: [i8; 4]) -> u32 {
    bytes[0] as u8 as u32
        | (bytes[1] as u8 as u32) << 8
        | (bytes[2] as u8 as u32) << 16
        | (bytes[3] as u8 as u32) << 24
}

/// The calling thread as one lane of its warp. All 32 lanes must run the walk together.
#[derive(Clone, Copy)]
pub struct Warp {
    lane: usize,
}

impl Warp {
    /// The calling lane.
    #[inline(always)]
    pub fn here() -> Self {
        Self { lane: warp::lane_id() as usize % LANES }
    }

    /// Number of the calling lane.
    #[inline(always)]
    pub fn lane(self) -> usize {
        self.lane
    }
}

impl Lanes for Warp {
    type Arith = Device;
    type Partials = f32;

    #[inline(always)]
    fn arith(self) -> Device {
        Device
    }
    #[inline(always)]
    fn splat(self, value: f32) -> f32 {
        value
    }
    #[inline(always)]
    fn update(self, partials: &mut f32, mut step: impl FnMut(usize, f32) -> f32) {
        *partials = step(self.lane, *partials);
    }
    #[inline(always)]
    fn for_each(self, mut step: impl FnMut(usize)) {
        step(self.lane);
    }
    #[inline(always)]
    fn sum(self, partials: f32) -> f32 {
        let mut p = partials;
        p = Device.add(p, warp::shuffle_xor_f32(p, 16));
        p = Device.add(p, warp::shuffle_xor_f32(p, 8));
        p = Device.add(p, warp::shuffle_xor_f32(p, 4));
        p = Device.add(p, warp::shuffle_xor_f32(p, 2));
        Device.add(p, warp::shuffle_xor_f32(p, 1))
    }
}
