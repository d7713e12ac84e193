//! What several entries share: quantising a part in a warp, the norm of a column in a block, finite checks.

use cuda_device::{ptx_asm, thread, warp};
use kiln_kernels::{Arith, LANES, NAN, canonical, math};

use crate::arith::Device;
use crate::layout::{Activations, PART, PartMeta, meta_place, quant_place};

/// For each number below 16, unrolled: an array that is indexed by it stays in registers.
macro_rules! each_output {
    ($n:ident => $body:expr) => {
        each_output!(@ $n $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $n:ident $body:expr, $($number:literal)*) => {{ $({
        const $n: usize = $number;
        $body
    })* }};
}
pub(crate) use each_output;

/// Lets the next launch begin, and waits until the ones before it are done and what they wrote can be seen.
///
/// Every entry of the forward pass calls it before it reads what another one writes. What comes before it may only touch
/// weights. Without the launch attribute that overlaps launches it does nothing.
#[inline(always)]
pub fn begin() {
    #[cfg(overlap)]
    // SAFETY: orders launches; no registers or memory of this thread are touched.
    unsafe {
        ptx_asm!("griddepcontrol.launch_dependents;", clobber("memory"));
        ptx_asm!("griddepcontrol.wait;", clobber("memory"));
    }
}

/// Number of the calling thread in its block.
#[inline(always)]
pub fn thread_index() -> usize {
    thread::threadIdx_x() as usize
}

/// The butterfly of `Lanes::sum`, with NaNs made one.
#[inline(always)]
pub fn butterfly(partial: f32) -> f32 {
    let a = Device;
    let mut p = partial;
    p = a.add(p, warp::shuffle_xor_f32(p, 16));
    p = a.add(p, warp::shuffle_xor_f32(p, 8));
    p = a.add(p, warp::shuffle_xor_f32(p, 4));
    p = a.add(p, warp::shuffle_xor_f32(p, 2));
    canonical(a.add(p, warp::shuffle_xor_f32(p, 1)))
}

/// The largest word of all lanes.
///
/// Spelled, with a move in front: the backend looks at the text between two semicolons, and takes `redux.sync` beside the
/// `.f32` of another instruction for one that only later cards have.
#[inline(always)]
pub fn largest_of_warp(word: u32) -> u32 {
    let largest: u32;
    // SAFETY: all lanes of the warp are here.
    unsafe {
        ptx_asm!("mov.b32 %0, %1; redux.sync.max.u32 %0, %0, 0xffffffff;", out("=r") largest, in("r") word);
    }
    largest
}

/// The wrapping sum of the words of all lanes.
#[inline(always)]
fn sum_of_warp(word: u32) -> u32 {
    let sum: u32;
    // SAFETY: as above.
    unsafe {
        ptx_asm!("mov.b32 %0, %1; redux.sync.add.u32 %0, %0, 0xffffffff;", out("=r") sum, in("r") word);
    }
    sum
}

/// Quantises a part, a value a lane, as `kiln_kernels::quantize_q8_block` does: the lane's quant, and what goes with it.
#[inline(always)]
pub fn quantise(value: f32, lane: usize) -> (i8, PartMeta) {
    let a = Device;
    let largest = largest_of_warp(value.to_bits() & 0x7fff_ffff);
    let mut scale = a.div(f32::from_bits(largest), 127.0);
    let mut inverse = a.div(1.0, scale);
    if largest >= 0x7f80_0000 {
        scale = NAN;
        inverse = 0.0;
    } else if scale.to_bits() < 0x0080_0000 {
        scale = 0.0;
        inverse = 0.0;
    }
    let quant = if inverse == 0.0 { 0 } else { a.round_small(a.mul(value, inverse)) };
    let sums = sum_of_warp((quant as u32) << (if lane < 16 { 0 } else { 16 }));
    (quant as i8, PartMeta { scale, sums })
}

/// Quantises a part and writes it: `value` is element `i` of a column of `width`. All lanes of the warp must call it together.
///
/// # Safety
/// The column is one of `out`.
#[inline(always)]
pub unsafe fn write_part(
    out: Activations,
    tiled: bool,
    column: usize,
    width: usize,
    i: usize,
    value: f32,
    lane: usize,
) {
    let (quant, meta) = quantise(value, lane);
    // SAFETY: the caller's promise; each lane has its own byte.
    unsafe {
        *out.quants.add(quant_place(tiled, column, i, width)) = quant;
        if lane == 0 {
            *out.meta.add(meta_place(tiled, column, i / PART, width / PART)) = meta;
        }
    }
}

/// The sum of squares of `count` numbers, in the chains and butterfly of `kiln_kernels::rms_norm`, and from it the scale.
/// All lanes of a warp must call it together.
///
/// # Safety
/// `x` holds `count` numbers.
#[inline(always)]
pub unsafe fn norm_scale(x: *const f32, count: usize, epsilon: f32, lane: usize) -> f32 {
    let a = Device;
    let mut p = 0.0;
    let mut i = lane;
    // SAFETY: `i` stays below `count`.
    unsafe {
        // Eight loads in flight.
        while i + 7 * LANES < count {
            let x0 = *x.add(i);
            let x1 = *x.add(i + LANES);
            let x2 = *x.add(i + 2 * LANES);
            let x3 = *x.add(i + 3 * LANES);
            let x4 = *x.add(i + 4 * LANES);
            let x5 = *x.add(i + 5 * LANES);
            let x6 = *x.add(i + 6 * LANES);
            let x7 = *x.add(i + 7 * LANES);
            p = a.fma(x0, x0, p);
            p = a.fma(x1, x1, p);
            p = a.fma(x2, x2, p);
            p = a.fma(x3, x3, p);
            p = a.fma(x4, x4, p);
            p = a.fma(x5, x5, p);
            p = a.fma(x6, x6, p);
            p = a.fma(x7, x7, p);
            i += 8 * LANES;
        }
        while i < count {
            let v = *x.add(i);
            p = a.fma(v, v, p);
            i += LANES;
        }
    }
    let mean = a.div(butterfly(p), a.i32_to_f32(count as i32));
    a.div(1.0, a.sqrt(a.add(mean, epsilon)))
}

/// A normalised number.
#[inline(always)]
pub fn normalised(x: f32, scale: f32, weight: f32) -> f32 {
    let a = Device;
    canonical(a.mul(a.mul(x, scale), weight))
}

/// The activation between the halves of a feed-forward block, times `up`; `limit` clamps both first, infinity does not.
#[inline(always)]
pub fn gated(activation: u32, gate: f32, up: f32, limit: f32) -> f32 {
    let kind = if activation == 0 { math::Gate::Silu } else { math::Gate::GeluTanh };
    math::gated(Device, kind, gate, up, limit)
}

/// Adds to a counter and returns what was there.
///
/// # Safety
/// `counter` is a counter on the card.
#[inline(always)]
pub unsafe fn count_up(counter: *mut u32, by: u32) -> u32 {
    let before: u32;
    // SAFETY: an atomic on the caller's counter.
    unsafe {
        ptx_asm!("atom.global.add.u32 %0, [%1], %2;", out("=r") before, in("l") counter, in("r") by, clobber("memory"));
    }
    before
}

/// Orders the thread's accesses, before and after, as other threads of the card see them.
///
/// # Safety
/// None but being on the card.
#[inline(always)]
pub unsafe fn thread_fence() {
    // SAFETY: orders the thread's own accesses.
    unsafe { ptx_asm!("fence.acq_rel.gpu;", clobber("memory")) }
}

/// Whether a number is neither infinite nor a NaN.
#[inline(always)]
pub fn is_finite(value: f32) -> bool {
    value.to_bits() & 0x7f80_0000 != 0x7f80_0000
}

/// Raises a fault: the smallest stage and column win.
///
/// # Safety
/// `fault` is the fault word.
#[inline(always)]
pub unsafe fn raise(fault: *mut u32, stage: u32, column: u32) {
    let code = stage << 16 | column;
    // SAFETY: an atomic on the caller's word.
    unsafe {
        ptx_asm!("red.global.min.u32 [%0], %1;", in("l") fault, in("r") code, clobber("memory"));
    }
}

/// Raises a fault if the number is not finite.
///
/// # Safety
/// `fault` is the fault word.
#[inline(always)]
pub unsafe fn check(value: f32, fault: *mut u32, stage: u32, column: u32) {
    if !is_finite(value) {
        // SAFETY: the caller's promise.
        unsafe { raise(fault, stage, column) }
    }
}
