//! The launch contracts: none states less than an entry's buffers hold, and a shorter buffer is refused.

use super::*;
use crate::contract::{Contract, Reach};

/// Every entry of the forward pass.
const ENTRIES: [&str; 27] = [
    "kiln_activate",
    "kiln_argmax",
    "kiln_attend",
    "kiln_batch_narrow",
    "kiln_batch_wide",
    "kiln_combine",
    "kiln_embed",
    "kiln_gated_rows_narrow",
    "kiln_gated_rows_wide",
    "kiln_gather",
    "kiln_group",
    "kiln_grouped_down",
    "kiln_grouped_gated",
    "kiln_heads",
    "kiln_norm",
    "kiln_normed_rows_narrow",
    "kiln_normed_rows_wide",
    "kiln_pairs",
    "kiln_post_norm",
    "kiln_rows_narrow",
    "kiln_rows_wide",
    "kiln_selected_down_narrow",
    "kiln_selected_down_wide",
    "kiln_selected_gated_narrow",
    "kiln_selected_gated_wide",
    "kiln_tiles",
    "kiln_wide_tiles",
];

/// Launches every entry with buffers that are exactly as long as its module says: a contract that states more refuses the
/// launch, one that states less shows as slack.
pub(super) fn contracts(context: &Context) -> Result<Tally> {
    let mut gpu = Gpu::open(context.device)?;
    gpu.note_slack();
    let mut tally = Tally::default();
    let mut rng = Rng(8);
    operations(&gpu, &mut rng, 0, &mut tally)?;
    for kind in [TensorType::Q4K, TensorType::F32] {
        kquant_of(&gpu, &[kind], false, &mut tally)?;
        fused::of_type(&gpu, &mut rng, &mut tally, kind, &mut false)?;
    }
    selected::usual(&gpu, &mut tally)?;
    let longer = usize::from(context.planted("long-buffer"));
    let slack = gpu.slack();
    for ((entry, buffer), bytes) in &slack {
        tally.words(&|_| format!("{entry}: bytes beyond `{buffer}`"), &[0], &[bytes + longer]);
    }
    let seen: Vec<&str> =
        ENTRIES.into_iter().filter(|name| slack.keys().any(|(entry, _)| entry == name)).collect();
    tally.words(&|i| format!("entry {i} with a contract"), &ENTRIES, &seen);
    refusals(&gpu, &mut tally)?;
    Ok(tally)
}

/// A contract of one buffer.
#[derive(Clone, Copy)]
struct One {
    address: u64,
    bytes: usize,
}

impl Contract for One {
    fn reaches(&self, entry: &str, _: (usize, usize)) -> Option<Vec<Reach>> {
        let One { address, bytes } = *self;
        (entry == "kiln_norm").then(|| vec![Reach { buffer: "one", address, bytes }])
    }
}

fn refusals(gpu: &Gpu, tally: &mut Tally) -> Result<()> {
    let (norm, embed) = (gpu.entry("kiln_norm")?, gpu.entry("kiln_embed")?);
    for len in [1usize, 100, 5000, 3_000_001] {
        let buffer = DeviceBuffer::from_host(&gpu.stream, &vec![0u8; len])?;
        let address = buffer.cu_deviceptr();
        let refused = [
            gpu.check_contract(&norm, (1, 1), &One { address, bytes: len }).is_err(),
            gpu.check_contract(&norm, (1, 1), &One { address, bytes: len + 1 }).is_err(),
            gpu.check_contract(&norm, (1, 1), &One { address: address + 1, bytes: len }).is_err(),
            gpu.check_contract(&norm, (1, 1), &One { address: 0, bytes: 1 }).is_err(),
            // Not the arguments of that entry.
            gpu.check_contract(&embed, (1, 1), &One { address, bytes: len }).is_err(),
        ];
        tally.words(&|i| format!("{len} bytes: refusal {i}"), &[false, true, true, true, true], &refused);
    }
    Ok(())
}
