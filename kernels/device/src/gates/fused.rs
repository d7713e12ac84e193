//! The entries that do several operations at once, and the pair entry, against the walks on the host.

use super::*;
use crate::fused;

/// Every type and K: two rows a warp; norm, quantising and rows; the gated pair with clamps and without.
pub(super) fn fused_rows(context: &Context) -> Result<Tally> {
    let gpu = Gpu::open(context.device)?;
    let mut tally = Tally::default();
    let mut rng = Rng(5);
    let mut planted = context.planted("norm-bit");
    for kind in TensorType::ALL {
        of_type(&gpu, &mut rng, &mut tally, kind, &mut planted)?;
    }
    // Rows that are no whole parts.
    compare(&gpu, &mut rng, &mut tally, TensorType::F16, 200, false, &mut planted)?;
    Ok(tally)
}

/// One type.
pub(super) fn of_type(
    gpu: &Gpu,
    rng: &mut Rng,
    tally: &mut Tally,
    kind: TensorType,
    planted: &mut bool,
) -> Result<()> {
    for (columns, wild) in [(256, false), (256, true), (2304, false), (4096, false), (8192, false)] {
        if kind.row_bytes(columns).is_some() {
            compare(gpu, rng, tally, kind, columns, wild, planted)?;
        }
    }
    Ok(())
}

struct Matrix3 {
    bytes: Vec<u8>,
    kind: TensorType,
    rows: usize,
    uploaded: upload::Uploaded,
}

impl Matrix3 {
    fn new(
        gpu: &Gpu,
        rng: &mut Rng,
        kind: TensorType,
        rows: usize,
        columns: usize,
        wild: bool,
    ) -> Result<Matrix3> {
        let bytes = rng.rows(kind, rows, columns, wild);
        let description = Description { kind, rows, columns };
        let uploaded = upload::copy(&gpu.stream, &description, upload::pack(&description, &bytes, 2))?;
        Ok(Matrix3 { bytes, kind, rows, uploaded })
    }

    /// The plain walk of every row.
    fn products(&self, x: &[f32]) -> Vec<f32> {
        let parts = x.len() / PART;
        let (mut quants, mut scales) = (vec![0; parts * PART], vec![0.0; parts]);
        quantize_q8(Host, &x[..parts * PART], &mut quants, &mut scales);
        let Some(quantised) = Q8Activations::new(&quants, &scales) else { return Vec::new() };
        self.bytes
            .chunks_exact(self.bytes.len() / self.rows)
            .map(|row| quant::row_dot(self.kind, row, x, quantised))
            .collect()
    }
}

fn compare(
    gpu: &Gpu,
    rng: &mut Rng,
    tally: &mut Tally,
    kind: TensorType,
    columns: usize,
    wild: bool,
    planted: &mut bool,
) -> Result<()> {
    let stream = &gpu.stream;
    let name = format!("{kind} K {columns}{}", if wild { " wild" } else { "" });
    let residual = rng.floats(if wild { 1 } else { 0 }, columns);
    let weight = rng.floats(0, columns);
    let epsilon = 1e-5;
    let mut normed = vec![0.0; columns];
    rms_norm(HostLanes, &residual, &weight, epsilon, |i, value| normed[i] = value);
    let mut on_card = weight.clone();
    if std::mem::take(planted) {
        on_card[0] = f32::from_bits(on_card[0].to_bits() ^ 1 << 16);
    }
    let (dr, dw) = (DeviceBuffer::from_host(stream, &residual)?, DeviceBuffer::from_host(stream, &on_card)?);
    let fault = DeviceBuffer::from_host(stream, &[NO_FAULT])?;
    let x = Columns::new(gpu, residual.clone(), columns)?;
    let first = Matrix3::new(gpu, rng, kind, 37, columns, wild)?;
    let args =
        |m: &Matrix3, out: &DeviceBuffer<f32>| row_args(m.uploaded.matrix, out, x.on_card(), 1, &fault);

    // Two rows a warp, an odd number of them, and a row; written, and added and checked.
    let products = first.products(&residual);
    let pairs = (first.rows.div_ceil(2).div_ceil(THREADS / 32), 1);
    let plain = |span| (rows::blocks([first.rows, 0, 0], span), 1);
    for (entry, grid) in
        [("kiln_pairs", pairs), ("kiln_rows_wide", plain(32)), ("kiln_rows_narrow", plain(8))]
    {
        for mode in [mode::STORE, mode::ADD] {
            let out = DeviceBuffer::from_host(stream, &vec![9f32; first.rows])?;
            let fault = DeviceBuffer::from_host(stream, &[NO_FAULT])?;
            let mut args = args(&first, &out);
            (args.mode, args.stage, args.first_column) = (mode, 44, 3);
            args.fault = fault.cu_deviceptr() as *mut u32;
            // SAFETY: the buffers are as long as the module says.
            unsafe { gpu.launch(&gpu.entry(entry)?, grid, THREADS, 0, &args)? };
            let added = mode == mode::ADD;
            let want: Vec<f32> =
                products.iter().map(|p| if added { canonical(Host.add(9.0, *p)) } else { *p }).collect();
            let got: Vec<f32> = out.to_host_vec(stream)?.into_iter().map(canonical).collect();
            tally.floats(&|i| format!("{name} {entry} mode {mode} row {i}"), &want, &got);
            let bad = added && want.iter().any(|v| !v.is_finite());
            let fault_wanted = if bad { 44 << 16 | 3 } else { NO_FAULT };
            tally.words(&|_| format!("{name} {entry} fault"), &[fault_wanted], &fault.to_host_vec(stream)?);
        }
    }

    // Three matrices, two of one type, so that pairs of one and of two types are there.
    let float_kind = if kind.row_bytes(columns).is_some() && !columns.is_multiple_of(PART) {
        kind
    } else {
        TensorType::Q8_0
    };
    let (second, third) = (
        Matrix3::new(gpu, rng, kind, 20, columns, wild)?,
        Matrix3::new(gpu, rng, float_kind, 41, columns, false)?,
    );
    let shared = fused::shared_bytes(columns);
    for (span, entry) in [(32, "kiln_normed_rows_wide"), (8, "kiln_normed_rows_narrow")] {
        let entry = gpu.entry(entry)?;
        gpu.allow_shared(&entry, shared)?;
        for with_norm in [true, false] {
            // Blocks that take a row each, several, and more blocks than rows.
            for blocks in [1, 2, 64] {
                let outs = [
                    DeviceBuffer::from_host(stream, &vec![9f32; first.rows])?,
                    DeviceBuffer::from_host(stream, &vec![9f32; second.rows])?,
                    DeviceBuffer::from_host(stream, &vec![9f32; third.rows])?,
                ];
                let mut args = args(&first, &outs[0]);
                (args.second, args.third) = (second.uploaded.matrix, third.uploaded.matrix);
                args.second_out = outs[1].cu_deviceptr() as *mut f32;
                args.third_out = outs[2].cu_deviceptr() as *mut f32;
                args.residual = dr.cu_deviceptr() as *const f32;
                args.epsilon = epsilon;
                if with_norm {
                    args.norm = dw.cu_deviceptr() as *const f32;
                }
                // SAFETY: any grid covers the rows; the buffers are as long as the module says.
                unsafe { gpu.launch(&entry, (blocks, 1), fused::TEAM, shared, &args)? };
                for (number, (matrix, out)) in [&first, &second, &third].into_iter().zip(&outs).enumerate() {
                    let x = if with_norm { &normed } else { &residual };
                    tally.floats(
                        &|i| format!("{name} normed {with_norm} span {span} blocks {blocks} matrix {number} row {i}"),
                        &matrix.products(x),
                        &out.to_host_vec(stream)?,
                    );
                }
            }
        }
    }
    gated(gpu, rng, tally, &name, kind, wild, (&dr, &dw), &normed)
}

/// The gated pair, its products quantised or not.
#[allow(clippy::too_many_arguments)]
fn gated(
    gpu: &Gpu,
    rng: &mut Rng,
    tally: &mut Tally,
    name: &str,
    kind: TensorType,
    wild: bool,
    (dr, dw): (&DeviceBuffer<f32>, &DeviceBuffer<f32>),
    normed: &[f32],
) -> Result<()> {
    let stream = &gpu.stream;
    let (inner, columns) = (96, normed.len());
    let (gate, up) = (
        Matrix3::new(gpu, rng, kind, inner, columns, wild)?,
        Matrix3::new(gpu, rng, kind, inner, columns, wild)?,
    );
    let (gates, ups) = (gate.products(normed), up.products(normed));
    let fault = DeviceBuffer::from_host(stream, &[NO_FAULT])?;
    let shared = fused::shared_bytes(columns);
    for (span, entry) in [(32, "kiln_gated_rows_wide"), (8, "kiln_gated_rows_narrow")] {
        let entry = gpu.entry(entry)?;
        gpu.allow_shared(&entry, shared)?;
        for (number, limit) in [f32::INFINITY, 10.0, 0.5].into_iter().enumerate() {
            for quantised in [true, false] {
                let activation = (number + usize::from(quantised)) as u32 % 2;
                let kind = if activation == 0 { math::Gate::Silu } else { math::Gate::GeluTanh };
                let want: Vec<f32> =
                    gates.iter().zip(&ups).map(|(g, u)| math::gated(Host, kind, *g, *u, limit)).collect();
                let out = Columns::new(gpu, vec![7.0; inner], inner)?;
                let ready = DeviceBuffer::from_host(stream, &vec![0u32; inner / PART])?;
                let mut args = row_args(gate.uploaded.matrix, &out.on_card.0, out.on_card(), 1, &fault);
                args.second = up.uploaded.matrix;
                args.second_out = args.first_out;
                if quantised {
                    args.third_out = ready.cu_deviceptr() as *mut f32;
                }
                args.norm = dw.cu_deviceptr() as *const f32;
                args.residual = dr.cu_deviceptr() as *const f32;
                args.epsilon = 1e-5;
                args.activation = activation;
                args.limit = limit;
                let blocks = 1 + 2 * number;
                // SAFETY: any grid covers the rows; the buffers and counters are what the module says.
                unsafe { gpu.launch(&entry, (blocks, 1), fused::TEAM, shared, &args)? };
                let name = format!("{name} gated span {span} clamp {limit} activation {activation}");
                if quantised {
                    compare_activations(gpu, tally, &name, &want, inner, &out)?;
                    let counts = ready.to_host_vec(stream)?;
                    tally.words(&|i| format!("{name} counter {i}"), &vec![0; counts.len()], &counts);
                } else {
                    let by_bits = |v: &f32| canonical(*v);
                    let got: Vec<f32> = out.on_card.0.to_host_vec(stream)?.iter().map(by_bits).collect();
                    let want: Vec<f32> = want.iter().map(by_bits).collect();
                    tally.floats(&|i| format!("{name} row {i}"), &want, &got);
                }
            }
        }
    }
    Ok(())
}
