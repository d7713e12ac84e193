//! The scalar reference: each operation as its definition says it, lane by lane, sharing no code with the walks.

const LANES: usize = 32;
const BLOCK: usize = 32;

/// One q8_0 row (blocks of 34 bytes) times activations.
pub fn q8_0_row(row: &[u8], quants: &[i8], scales: &[f32]) -> f32 {
    let mut partials = [0f32; LANES];
    for (lane, partial) in partials.iter_mut().enumerate() {
        for block in (lane..scales.len()).step_by(LANES) {
            let bytes = &row[block * 34..block * 34 + 34];
            let mut dot = 0i64;
            for i in 0..BLOCK {
                dot += i64::from(bytes[2 + i] as i8) * i64::from(quants[block * BLOCK + i]);
            }
            let scale = half(u16::from_le_bytes([bytes[0], bytes[1]])) * scales[block];
            *partial = scale.mul_add(dot as f32, *partial);
        }
    }
    one_nan(butterfly(partials))
}

/// The rms norm of one row.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut partials = [0f32; LANES];
    for (lane, partial) in partials.iter_mut().enumerate() {
        for i in (lane..x.len()).step_by(LANES) {
            *partial = x[i].mul_add(x[i], *partial);
        }
    }
    let mean = butterfly(partials) / x.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    x.iter().zip(weight).map(|(x, w)| one_nan((x * scale) * w)).collect()
}

/// Quants and scales of `x`.
pub fn quantize_q8(x: &[f32]) -> (Vec<i8>, Vec<f32>) {
    let (mut quants, mut scales) = (Vec::new(), Vec::new());
    for block in x.chunks(BLOCK) {
        let largest = block.iter().fold(0f32, |m, v| if v.abs() > m { v.abs() } else { m });
        let scale = largest / 127.0;
        if block.iter().any(|v| !v.is_finite()) {
            scales.push(f32::from_bits(0x7fc0_0000));
            quants.extend([0; BLOCK]);
        } else if scale < f32::MIN_POSITIVE {
            scales.push(0.0);
            quants.extend([0; BLOCK]);
        } else {
            let inverse = 1.0 / scale;
            scales.push(scale);
            quants.extend(block.iter().map(|v| (v * inverse).round_ties_even() as i8));
        }
    }
    (quants, scales)
}

/// Every lane, every round, as a warp does it.
fn butterfly(mut partials: [f32; LANES]) -> f32 {
    for distance in [16, 8, 4, 2, 1] {
        let before = partials;
        for lane in 0..LANES {
            partials[lane] = before[lane] + before[lane ^ distance];
        }
    }
    partials[0]
}

fn one_nan(value: f32) -> f32 {
    if value.is_nan() { f32::from_bits(0x7fc0_0000) } else { value }
}

/// Half precision to f32 by the format's definition: every step is exact.
fn half(bits: u16) -> f32 {
    let sign = if bits >> 15 == 1 { -1.0f32 } else { 1.0 };
    let exponent = i32::from(bits >> 10 & 31);
    let fraction = f32::from(bits & 1023);
    let magnitude = match exponent {
        0 => fraction * (-24f32).exp2(),
        31 if fraction == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        _ => (1024.0 + fraction) * 2f32.powi(exponent - 25),
    };
    sign * magnitude
}
