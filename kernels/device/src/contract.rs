//! Launch contracts of the entries that take addresses: which buffers a launch reaches, and how far.
//!
//! An argument says nothing of the allocation behind its addresses. So [`crate::gpu::Gpu::launch`] asks the driver for the
//! allocation of each address, and refuses a launch that would reach beyond it. What is stated here is what the modules of
//! the entries state in words; the host holds to it for every launch, also those that a graph records.

use crate::layout::{
    ActivateArgs, Activations, ArgmaxArgs, COLUMNS, EmbedArgs, ExpertsArgs, HeadsArgs, Matrix, NormArgs,
    PART, PostArgs, RowsArgs, TILE, class, mode,
};

/// How far a launch reaches from an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// The buffer's name in the arguments.
    pub buffer: &'static str,
    /// Where it begins on the card.
    pub address: u64,
    /// Bytes from there.
    pub bytes: usize,
}

/// Arguments of entries.
pub trait Contract: Copy {
    /// What a launch of `entry` over `grid` reaches. `None`: these are not the arguments of that entry.
    fn reaches(&self, entry: &str, grid: (usize, usize)) -> Option<Vec<Reach>>;
}

/// Collects reaches; nothing is reached of no bytes.
#[derive(Default)]
struct Reaches(Vec<Reach>);

impl Reaches {
    fn add<T>(&mut self, buffer: &'static str, address: *const T, elements: usize) {
        if elements > 0 {
            self.0.push(Reach {
                buffer,
                address: address as u64,
                bytes: elements.saturating_mul(size_of::<T>()),
            });
        }
    }

    /// A buffer that need not be there.
    fn optional<T>(&mut self, buffer: &'static str, address: *const T, elements: usize) {
        if !address.is_null() {
            self.add(buffer, address, elements);
        }
    }

    fn matrix(&mut self, m: &Matrix) {
        let elements = (m.rows as usize).saturating_mul(m.columns as usize);
        let parts = elements / PART;
        let (quants, factors, scales) = match m.class {
            class::Q4_0 => (16 * parts, 0, 2 * parts),
            class::Q4_1 => (16 * parts, 0, 4 * parts),
            class::BYTES => (32 * parts, 0, 2 * parts),
            class::Q5_1 => (32 * parts, 0, 4 * parts),
            class::Q2K => (16 * parts, 4 * parts, parts / 2),
            class::Q3K | class::Q4K => (16 * parts, 2 * parts, parts / 2),
            class::Q5K | class::Q6K => (32 * parts, 2 * parts, parts / 2),
            class::F32 => (4 * elements, 0, 0),
            _ => (2 * elements, 0, 0),
        };
        self.add("quants of a matrix", m.quants, quants);
        self.add("factors of a matrix", m.factors, factors);
        self.add("scales of a matrix", m.scales, scales);
    }

    /// Floats of columns.
    fn values(&mut self, x: &Activations, elements: usize) {
        self.add("values", x.values, elements);
    }

    /// Parts of columns: with `tiled` 8 columns lie together.
    fn parts(&mut self, x: &Activations, columns: usize, width: usize, tiled: bool) {
        if width.is_multiple_of(PART) {
            let columns = if tiled { columns.next_multiple_of(8) } else { columns };
            self.add("quants of columns", x.quants, columns * width);
            self.add("parts of columns", x.meta, columns * (width / PART));
        }
    }

    /// Columns as a matrix reads them.
    fn columns_for(&mut self, m: &Matrix, x: &Activations, columns: usize) {
        if m.rows == 0 {
        } else if m.class >= class::F32 {
            self.values(x, columns * m.columns as usize);
        } else {
            self.parts(x, columns, m.columns as usize, false);
        }
    }
}

impl Contract for EmbedArgs {
    fn reaches(&self, entry: &str, (columns, _): (usize, usize)) -> Option<Vec<Reach>> {
        let mut all = Reaches::default();
        all.matrix(&self.table);
        all.add("state", self.state, 1 + columns);
        all.add("out", self.out, columns * self.table.columns as usize);
        all.add("fault", self.fault, 1);
        (entry == "kiln_embed").then_some(all.0)
    }
}

impl Contract for NormArgs {
    fn reaches(&self, entry: &str, (columns, _): (usize, usize)) -> Option<Vec<Reach>> {
        let width = self.width as usize;
        let mut all = Reaches::default();
        all.add("x", self.x, columns * width);
        all.add("weight", self.weight, width);
        all.values(&self.out, columns * width);
        all.parts(&self.out, columns, width, self.tiled != 0);
        (entry == "kiln_norm").then_some(all.0)
    }
}

impl Contract for PostArgs {
    fn reaches(&self, entry: &str, (columns, _): (usize, usize)) -> Option<Vec<Reach>> {
        let width = self.width as usize;
        let mut all = Reaches::default();
        all.add("added", self.added, columns * width);
        all.add("weight", self.weight, width);
        all.add("residual", self.residual, columns * width);
        all.add("fault", self.fault, 1);
        (entry == "kiln_post_norm").then_some(all.0)
    }
}

impl Contract for ActivateArgs {
    fn reaches(&self, entry: &str, (_, columns): (usize, usize)) -> Option<Vec<Reach>> {
        let width = self.width as usize;
        let mut all = Reaches::default();
        all.add("gate", self.gate, columns * width);
        all.optional("up", self.up, columns * width);
        all.values(&self.out, columns * width);
        all.parts(&self.out, columns, width, self.tiled != 0);
        (entry == "kiln_activate").then_some(all.0)
    }
}

impl Contract for HeadsArgs {
    fn reaches(&self, entry: &str, (_, columns): (usize, usize)) -> Option<Vec<Reach>> {
        let (width, context) = (self.width as usize, self.context as usize);
        let (queries, keys) = (self.heads as usize * width, self.kv_heads as usize * width);
        let mut all = Reaches::default();
        all.add("query", self.query, columns * queries);
        if entry == "kiln_heads" || self.fused != 0 {
            all.add("key", self.key, columns * keys);
            all.add("value", self.value, columns * keys);
            all.optional("query bias", self.query_bias, queries);
            all.optional("key bias", self.key_bias, keys);
            all.optional("value bias", self.value_bias, keys);
            all.optional("query norm", self.query_norm, width);
            all.optional("key norm", self.key_norm, width);
            all.add("angles", self.angles, 2 * self.pairs as usize * context);
        }
        all.add("keys", self.keys, keys * context);
        all.add("values of the cache", self.values, keys * context);
        all.add("state", self.state, 1);
        all.add("fault", self.fault, 1);
        if entry == "kiln_attend" {
            all.values(&self.out, columns * queries);
            if width.is_multiple_of(PART) {
                all.parts(&self.out, columns, queries, self.tiled != 0);
            }
        }
        matches!(entry, "kiln_heads" | "kiln_attend").then_some(all.0)
    }
}

impl Contract for RowsArgs {
    fn reaches(&self, entry: &str, _: (usize, usize)) -> Option<Vec<Reach>> {
        let mut all = Reaches::default();
        let matrices = [&self.first, &self.second, &self.third];
        let outs = [self.first_out, self.second_out, self.third_out];
        let columns = self.columns as usize;
        let width = self.first.columns as usize;
        let fused = matches!(entry, "kiln_normed_rows_wide" | "kiln_normed_rows_narrow");
        match entry {
            "kiln_gated_rows_wide" | "kiln_gated_rows_narrow" => {
                let rows = self.first.rows as usize;
                all.matrix(&self.first);
                all.matrix(&self.second);
                all.add("residual", self.residual, width);
                all.optional("norm", self.norm, width);
                all.values(&self.x, rows);
                if !self.third_out.is_null() {
                    all.parts(&self.x, 1, rows, false);
                    all.add("counters", self.third_out, rows.div_ceil(PART));
                }
                return Some(all.0);
            }
            "kiln_pairs" => all.columns_for(&self.first, &self.x, 1),
            "kiln_rows_wide" | "kiln_rows_narrow" => {
                matrices.iter().for_each(|m| all.columns_for(m, &self.x, 1));
            }
            "kiln_batch_wide" | "kiln_batch_narrow" => {
                let padded = columns.next_multiple_of(COLUMNS);
                matrices.iter().for_each(|m| all.columns_for(m, &self.x, padded));
            }
            "kiln_tiles" | "kiln_wide_tiles" => {
                let padded = columns.next_multiple_of(TILE);
                matrices.iter().for_each(|m| all.columns_for(m, &self.x, padded));
            }
            _ if fused => {
                all.add("residual", self.residual, width);
                all.optional("norm", self.norm, width);
            }
            _ => return None,
        }
        for (matrix, out) in matrices.into_iter().zip(outs) {
            all.matrix(matrix);
            all.add("out", out, columns * matrix.rows as usize);
        }
        if self.mode != mode::STORE {
            all.add("fault", self.fault, 1);
        }
        Some(all.0)
    }
}

impl Contract for ArgmaxArgs {
    fn reaches(&self, entry: &str, (_, columns): (usize, usize)) -> Option<Vec<Reach>> {
        let mut all = Reaches::default();
        all.add("logits", self.logits, columns * self.count as usize);
        all.add("best", self.best, columns);
        all.add("done", self.done, columns);
        all.add("tokens", self.tokens, columns);
        all.optional("state", self.state, 2);
        all.add("fault", self.fault, 1);
        (entry == "kiln_argmax").then_some(all.0)
    }
}

impl Contract for ExpertsArgs {
    fn reaches(&self, entry: &str, _: (usize, usize)) -> Option<Vec<Reach>> {
        let (tokens, tiles) = (self.tokens as usize, self.tiles as usize);
        let selections = tokens * self.used as usize;
        let (width, inner) = (self.gate.columns as usize, self.inner as usize);
        let rows = self.rows as usize;
        let mut all = Reaches::default();
        let grouped = !matches!(
            entry,
            "kiln_selected_gated_wide"
                | "kiln_selected_gated_narrow"
                | "kiln_selected_down_wide"
                | "kiln_selected_down_narrow"
        );
        if !grouped || entry == "kiln_group" {
            all.add("chosen", self.chosen, selections);
            all.add("fault", self.fault, 1);
        }
        if grouped && entry != "kiln_combine" {
            all.add("order", self.order, tiles * TILE);
            all.add("tile experts", self.tile_expert, tiles);
        }
        match entry {
            "kiln_selected_gated_wide" | "kiln_selected_gated_narrow" => {
                all.matrix(&self.gate);
                all.matrix(&self.up);
                all.columns_for(&self.gate, &self.x, tokens);
                all.columns_for(&self.up, &self.x, tokens);
                all.values(&self.made, selections * inner);
                all.parts(&self.made, selections, inner, false);
            }
            "kiln_selected_down_wide" | "kiln_selected_down_narrow" => {
                all.matrix(&self.down);
                all.columns_for(&self.down, &self.made, selections);
                all.add("weights", self.weights, selections);
                all.add("out", self.out, tokens * rows);
            }
            "kiln_group" => {}
            "kiln_gather" => {
                all.values(&self.x, tokens * width);
                all.parts(&self.sorted, tiles * TILE, width, true);
            }
            "kiln_grouped_gated" => {
                all.matrix(&self.gate);
                all.matrix(&self.up);
                all.parts(&self.sorted, tiles * TILE, width, true);
                all.parts(&self.made, tiles * TILE, inner, true);
            }
            "kiln_grouped_down" => {
                all.matrix(&self.down);
                all.parts(&self.made, tiles * TILE, inner, true);
                all.add("products", self.products, selections * rows);
            }
            "kiln_combine" => {
                all.add("weights", self.weights, selections);
                all.add("products", self.products, selections * rows);
                all.add("out", self.out, tokens * rows);
                all.add("fault", self.fault, 1);
            }
            _ => return None,
        }
        Some(all.0)
    }
}
