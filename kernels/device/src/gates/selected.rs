//! Experts' rows, selected one by one and sorted in tiles, against the plain walk on the host.

use kiln_engine::experts::{Block, Made, Stack};
use kiln_kernels::math::Gate as Activation;

use super::*;
use crate::experts::{self, Call, Entries, Sorted, Stacks};
use crate::layout::STAGE_RANGE;
use crate::upload::Uploaded;

/// One comparison.
#[derive(Clone, Copy)]
struct Case {
    kind: TensorType,
    /// The type of the down matrices.
    down: TensorType,
    width: usize,
    inner: usize,
    rows: usize,
    experts: usize,
    tokens: usize,
    used: usize,
    activation: Activation,
    limit: f32,
    mode: u32,
    /// Scales, activations and weights as they come, NaNs and infinities among them.
    wild: bool,
}

const USUAL: Case = Case {
    kind: TensorType::Q8_0,
    down: TensorType::Q8_0,
    width: 256,
    inner: 256,
    rows: 64,
    experts: 6,
    tokens: 5,
    used: 3,
    activation: Activation::Silu,
    limit: 10.0,
    mode: mode::STORE,
    wild: false,
};

/// Every type and K, with clamps of 10 and 0.5 and without; few and many tokens; faults.
pub(super) fn selected(context: &Context) -> Result<Tally> {
    let gpu = Gpu::open(context.device)?;
    let entries = Entries::of(&gpu)?;
    let mut tally = Tally::default();
    let mut rng = Rng(4);
    let mut cases = Vec::new();
    for kind in TensorType::ALL {
        for (number, width) in [256, 2304, 4096, 8192].into_iter().enumerate() {
            let limit = [10.0, 0.5, 10.0, 0.5][number];
            cases.push(Case { kind, down: kind, width, limit, ..USUAL });
        }
        cases.push(Case { kind, down: kind, limit: 0.5, ..USUAL });
        cases.push(Case { kind, down: kind, limit: f32::INFINITY, wild: true, ..USUAL });
        // Long down rows, of another type than those of gate and up.
        cases.push(Case { kind: TensorType::Q4_0, down: kind, inner: 2304, used: 2, ..USUAL });
    }
    cases.extend([
        Case { wild: true, limit: 0.5, ..USUAL },
        Case { activation: Activation::GeluTanh, ..USUAL },
        Case { activation: Activation::GeluTanh, limit: f32::INFINITY, mode: mode::ADD, ..USUAL },
        Case { mode: mode::CHECK, wild: true, ..USUAL },
        Case { tokens: 1, used: 1, experts: 1, ..USUAL },
        Case { tokens: 1, used: 8, experts: 128, inner: 96, width: 64, rows: 32, ..USUAL },
        // More than a tile of an expert, exactly one, and experts that nobody takes.
        Case { tokens: 70, used: 2, experts: 3, inner: 64, width: 96, ..USUAL },
        Case { tokens: 32, used: 1, experts: 1, inner: 32, width: 32, ..USUAL },
        Case { tokens: 150, used: 4, experts: 300, inner: 32, width: 64, mode: mode::ADD, ..USUAL },
    ]);
    for (number, case) in cases.into_iter().enumerate() {
        let planted = number == 0 && context.planted("slot-order");
        compare(&gpu, &entries, &mut rng, &mut tally, &case, planted)?;
    }
    refusals(&gpu, &entries, &mut rng, &mut tally)?;
    Ok(tally)
}

/// One case of each way, with buffers that are as long as they must be.
pub(super) fn usual(gpu: &Gpu, tally: &mut Tally) -> Result<()> {
    let entries = Entries::of(gpu)?;
    compare(gpu, &entries, &mut Rng(6), tally, &Case { kind: TensorType::Q4K, ..USUAL }, false)?;
    let floats = Case { kind: TensorType::F32, down: TensorType::F32, ..USUAL };
    compare(gpu, &entries, &mut Rng(7), tally, &floats, false)
}

/// Matrices on the host and on the card.
struct Matrices {
    bytes: [Vec<u8>; 3],
    uploaded: [Uploaded; 3],
}

impl Matrices {
    fn new(gpu: &Gpu, rng: &mut Rng, case: &Case) -> Result<Matrices> {
        let shapes = [
            (case.kind, case.inner, case.width),
            (case.kind, case.inner, case.width),
            (case.down, case.rows, case.inner),
        ];
        let mut make = |(kind, rows, columns)| -> Result<_> {
            let bytes = rng.rows(kind, case.experts * rows, columns, case.wild);
            let description = Description { kind, rows: case.experts * rows, columns };
            let uploaded = upload::copy(&gpu.stream, &description, upload::pack(&description, &bytes, 2))?;
            Ok((bytes, uploaded))
        };
        let [gate, up, down] = [make(shapes[0])?, make(shapes[1])?, make(shapes[2])?];
        Ok(Matrices { bytes: [gate.0, up.0, down.0], uploaded: [gate.1, up.1, down.1] })
    }

    fn stacks(&self, experts: usize) -> Stacks<'_> {
        let [gate, up, down] = &self.uploaded;
        Stacks { gate, up, down, experts }
    }

    /// By the plain walk.
    fn made(&self, case: &Case, x: &[f32], chosen: &[u32], weights: &[f32]) -> Result<Made> {
        let stack = |kind, rows, columns, bytes| {
            Stack::new(kind, rows, columns, bytes).ok_or("matrices that are not whole")
        };
        let [gate, up, down] = &self.bytes;
        let block = Block {
            gate: stack(case.kind, case.inner, case.width, gate)?,
            up: stack(case.kind, case.inner, case.width, up)?,
            down: stack(case.down, case.rows, case.inner, down)?,
            activation: case.activation,
            limit: case.limit,
        };
        Ok(block.run(x, case.used, chosen, weights))
    }
}

/// Room for columns on the card, with something in it that shows if it is not written.
struct Room {
    values: DeviceBuffer<f32>,
    quants: DeviceBuffer<i8>,
    meta: DeviceBuffer<u64>,
}

impl Room {
    fn new(gpu: &Gpu, elements: usize) -> Result<Room> {
        let stream = &gpu.stream;
        Ok(Room {
            values: DeviceBuffer::from_host(stream, &vec![7.0; elements])?,
            quants: DeviceBuffer::from_host(stream, &vec![77; elements])?,
            meta: DeviceBuffer::from_host(stream, &vec![7; elements / PART])?,
        })
    }

    fn columns(&self) -> experts::Columns<'_> {
        experts::Columns { values: &self.values, quants: &self.quants, meta: &self.meta }
    }
}

fn compare(
    gpu: &Gpu,
    entries: &Entries,
    rng: &mut Rng,
    tally: &mut Tally,
    case: &Case,
    planted: bool,
) -> Result<()> {
    let Case { width, inner, rows, experts, tokens, used, .. } = *case;
    if case.kind.row_bytes(width).is_none() || case.down.row_bytes(inner).is_none() {
        return Ok(());
    }
    let name = format!(
        "{} {} K {width} inner {inner} experts {experts} tokens {tokens}x{used} clamp {}",
        case.kind, case.down, case.limit
    );
    let selections = tokens * used;
    let matrices = Matrices::new(gpu, rng, case)?;
    let mut x = Vec::new();
    for token in 0..tokens {
        x.extend(rng.floats(if case.wild { token % 5 } else { 0 }, width));
    }
    let mut chosen: Vec<u32> = (0..selections).map(|_| rng.next() % experts as u32).collect();
    let mut weights: Vec<f32> = (0..selections).map(|_| rng.float()).collect();
    let want = matrices.made(case, &x, &chosen, &weights)?;
    if planted {
        // The same selections of the first token, two of them in another order.
        chosen.swap(0, 2);
        weights.swap(0, 2);
    }
    let stream = &gpu.stream;
    let base = rng.floats(0, tokens * rows);
    let (wanted, fault_wanted) = finished(case, &base, &want.out);
    let x = Columns::new(gpu, x, width)?;
    let given = (DeviceBuffer::from_host(stream, &chosen)?, DeviceBuffer::from_host(stream, &weights)?);
    let tiles = experts::most_tiles(selections, experts);
    for way in ["wide", "narrow", "tiles"] {
        let floats = !upload::is_quantised(case.kind) || !upload::is_quantised(case.down);
        if way == "tiles" && floats {
            continue;
        }
        let out = DeviceBuffer::from_host(stream, &base)?;
        let fault = DeviceBuffer::from_host(stream, &[NO_FAULT])?;
        let grouped = way == "tiles";
        let made = Room::new(gpu, inner * if grouped { tiles * TILE } else { selections })?;
        let (values, quants, meta) = (&x.on_card.0, &x.on_card.1, &x.on_card.2);
        let call = Call {
            stacks: matrices.stacks(experts),
            chosen: &given.0,
            weights: &given.1,
            x: experts::Columns { values, quants, meta },
            made: made.columns(),
            out: &out,
            fault: &fault,
            tokens,
            used,
            activation: u32::from(case.activation == Activation::GeluTanh),
            limit: case.limit,
            mode: case.mode,
            stage: 55,
        };
        let name = format!("{name} {way}");
        if grouped {
            let order = DeviceBuffer::from_host(stream, &vec![3u32; tiles * TILE])?;
            let tile_expert = DeviceBuffer::from_host(stream, &vec![0u32; tiles])?;
            let room = Room::new(gpu, tiles * TILE * width)?;
            let products = DeviceBuffer::from_host(stream, &vec![7f32; selections * rows])?;
            let sorted =
                Sorted { order: &order, tile_expert: &tile_expert, x: room.columns(), products: &products };
            experts::launch_grouped(gpu, entries, &call, &sorted)?;
            let got = products.to_host_vec(stream)?;
            let what = |i: usize| format!("{name} selection {} product {}", i / rows, i % rows);
            tally.floats(&what, &want.products, &got);
        } else {
            experts::launch_selected(gpu, entries, &call, way == "narrow")?;
            let made = Columns {
                values: Vec::new(),
                quants: Vec::new(),
                scales: Vec::new(),
                on_card: (made.values, made.quants, made.meta),
            };
            compare_activations(gpu, tally, &format!("{name} gated"), &want.gated, inner, &made)?;
        }
        let got: Vec<f32> = out.to_host_vec(stream)?.into_iter().map(canonical).collect();
        let what = |i: usize| format!("{name} token {} element {}", i / rows, i % rows);
        tally.floats(&what, &wanted, &got);
        tally.words(&|_| format!("{name} fault"), &[fault_wanted], &fault.to_host_vec(stream)?);
    }
    Ok(())
}

/// The result as the mode has it, and the fault word.
fn finished(case: &Case, base: &[f32], out: &[f32]) -> (Vec<f32>, u32) {
    let wanted: Vec<f32> = if case.mode == mode::ADD {
        base.iter().zip(out).map(|(a, b)| canonical(Host.add(*a, *b))).collect()
    } else {
        out.to_vec()
    };
    let bad = wanted.iter().position(|v| !v.is_finite()).filter(|_| case.mode != mode::STORE);
    let fault = bad.map_or(NO_FAULT, |i| 55 << 16 | (i / case.rows) as u32);
    (wanted, fault)
}

/// What the launchers do not take, and an expert that there is not.
fn refusals(gpu: &Gpu, entries: &Entries, rng: &mut Rng, tally: &mut Tally) -> Result<()> {
    let case = USUAL;
    let Case { width, inner, rows, experts, tokens, used, .. } = case;
    let matrices = Matrices::new(gpu, rng, &case)?;
    let stream = &gpu.stream;
    let selections = tokens * used;
    let x = Columns::new(gpu, rng.floats(0, tokens * width), width)?;
    let mut chosen: Vec<u32> = (0..selections as u32).map(|s| s % experts as u32).collect();
    let last = chosen.len() - 1;
    chosen[last] = experts as u32;
    let (chosen, weights) = (
        DeviceBuffer::from_host(stream, &chosen)?,
        DeviceBuffer::from_host(stream, &vec![0.5f32; selections])?,
    );
    let tiles = experts::most_tiles(selections, experts);
    let (made, room) = (Room::new(gpu, inner * tiles * TILE)?, Room::new(gpu, tiles * TILE * width)?);
    let (short_made, short_room) = (Room::new(gpu, inner * selections - 1)?, Room::new(gpu, width)?);
    let floats = |len: usize| DeviceBuffer::from_host(stream, &vec![7f32; len]);
    let words = |len: usize| DeviceBuffer::from_host(stream, &vec![7u32; len]);
    let (out, short_out, products) =
        (floats(tokens * rows)?, floats(tokens * rows - 1)?, floats(selections * rows)?);
    let (order, tile_expert, short) = (words(tiles * TILE)?, words(tiles)?, words(1)?);
    let short_floats = floats(1)?;
    let fault = words(1)?;
    let (values, quants, meta) = (&x.on_card.0, &x.on_card.1, &x.on_card.2);
    let good = Call {
        stacks: matrices.stacks(experts),
        chosen: &chosen,
        weights: &weights,
        x: experts::Columns { values, quants, meta },
        made: made.columns(),
        out: &out,
        fault: &fault,
        tokens,
        used,
        activation: 0,
        limit: 0.5,
        mode: mode::STORE,
        stage: 55,
    };
    let sorted = Sorted { order: &order, tile_expert: &tile_expert, x: room.columns(), products: &products };
    let calls = [
        Call { stacks: Stacks { experts: experts + 1, ..good.stacks }, ..good },
        Call { stacks: Stacks { experts: 0, ..good.stacks }, ..good },
        Call { stacks: Stacks { up: good.stacks.down, ..good.stacks }, ..good },
        Call { chosen: &short, ..good },
        Call { weights: &short_floats, ..good },
        Call { x: short_room.columns(), ..good },
        Call { made: short_made.columns(), ..good },
        Call { out: &short_out, ..good },
        Call { tokens: tokens + 1, ..good },
        Call { used: 0, ..good },
        Call { limit: 0.0, ..good },
        Call { limit: f32::NAN, ..good },
    ];
    for (number, call) in calls.iter().enumerate() {
        let refused = [
            experts::launch_selected(gpu, entries, call, false).is_err(),
            experts::launch_grouped(gpu, entries, call, &sorted).is_err(),
        ];
        tally.words(&|_| format!("refusal {number}"), &[true; 2], &refused);
    }
    let shorter = [
        Sorted { order: &short, ..sorted },
        Sorted { tile_expert: &short, ..sorted },
        Sorted { x: short_room.columns(), ..sorted },
        Sorted { products: &short_floats, ..sorted },
    ];
    for (number, sorted) in shorter.iter().enumerate() {
        let refused = experts::launch_grouped(gpu, entries, &good, sorted).is_err();
        tally.words(&|_| format!("sorted refusal {number}"), &[true], &[refused]);
    }
    let float_case = Case { kind: TensorType::F32, down: TensorType::F32, ..case };
    let float_matrices = Matrices::new(gpu, rng, &float_case)?;
    let call = Call { stacks: float_matrices.stacks(experts), ..good };
    let refused = experts::launch_grouped(gpu, entries, &call, &sorted).is_err();
    tally.words(&|_| "floats on the tensor cores".to_owned(), &[true], &[refused]);

    let range = STAGE_RANGE << 16 | (tokens - 1) as u32;
    for way in ["wide", "narrow", "tiles"] {
        let fault = DeviceBuffer::from_host(stream, &[NO_FAULT])?;
        let call = Call { fault: &fault, ..good };
        match way {
            "tiles" => experts::launch_grouped(gpu, entries, &call, &sorted)?,
            _ => experts::launch_selected(gpu, entries, &call, way == "narrow")?,
        }
        tally.words(&|_| format!("{way}: range fault"), &[range], &fault.to_host_vec(stream)?);
    }
    Ok(())
}
