//! Matrices as the CPU keeps them, and their products with columns of activations.

use std::ops::Range;

use super::kernel::{self, Level};
use super::panel::{self, Arena, COLUMNS, Column, Format, Partials, ROWS};
use super::pool::{Disjoint, Pool};
use crate::gguf::{Gguf, Tensor, TensorType};

use kiln_kernels::blocks::PART;

/// Where the weights of a model lie.
pub struct Store {
    /// The file, for what is used as it is there.
    pub file: Gguf,
    /// The panels.
    pub arena: Arena,
}

/// A matrix, ready for products.
pub struct Matrix {
    kind: TensorType,
    rows: usize,
    columns: usize,
    weights: Weights,
}

enum Weights {
    /// Panels of 16 rows of a quantised type, in the arena.
    Panels { place: Range<usize>, panel_bytes: usize },
    /// Rows of floats, as the file has them.
    Rows(Tensor),
}

impl Matrix {
    /// Takes a tensor over: quantised ones are repacked, with all threads of the pool.
    ///
    /// # Panics
    /// If the arena is smaller than the [`Matrix::load_bytes`] of all tensors.
    pub fn load(store: &mut Store, tensor: &Tensor, pool: &mut Pool) -> Matrix {
        let (rows, columns, kind) = (tensor.rows(), tensor.columns(), tensor.kind);
        let Some(format) = Format::of(kind) else {
            return Matrix { kind, rows, columns, weights: Weights::Rows(tensor.clone()) };
        };
        let parts = columns / PART;
        let panel_bytes = format.panel_bytes(parts);
        let panels = rows.div_ceil(ROWS);
        let Some(place) = store.arena.take(panels * panel_bytes) else {
            panic!("the arena is made for all matrices");
        };
        let source = store.file.data(tensor);
        let row_bytes = source.len() / rows;
        let target = Disjoint::new(&mut store.arena.bytes_mut()[place.clone()]);
        pool.for_each(panels, 16, |_, range| {
            for index in range {
                let rows = &source[index * ROWS * row_bytes..((index + 1) * ROWS).min(rows) * row_bytes];
                // SAFETY: each panel is its own part.
                let out = unsafe { target.part(index * panel_bytes..(index + 1) * panel_bytes) };
                panel::pack(kind, rows, parts, out);
            }
        });
        Matrix { kind, rows, columns, weights: Weights::Panels { place, panel_bytes } }
    }

    /// Bytes that loading this tensor takes in memory, besides the mapped file.
    pub fn load_bytes(tensor: &Tensor) -> u64 {
        match Format::of(tensor.kind) {
            None => tensor.byte_len() as u64,
            Some(format) => {
                (tensor.rows().div_ceil(ROWS) * format.panel_bytes(tensor.columns() / PART)) as u64
            }
        }
    }

    /// Bytes that one product with a column reads.
    pub fn bytes(&self) -> u64 {
        match &self.weights {
            Weights::Panels { place, .. } => place.len() as u64,
            Weights::Rows(tensor) => tensor.byte_len() as u64,
        }
    }

    fn panels(&self) -> usize {
        self.rows.div_ceil(ROWS)
    }

    /// Products of some panels with all columns.
    #[allow(clippy::too_many_arguments)]
    fn multiply_panels(
        &self,
        store: &Store,
        level: Level,
        panels: Range<usize>,
        x: &Activations,
        count: usize,
        partials: &mut Partials,
        out: &Disjoint<'_, f32>,
    ) {
        for index in panels {
            let first = index * ROWS;
            let rows = (self.rows - first).min(ROWS);
            // SAFETY (of both parts below): a panel's rows are its own in every column.
            let target = |column: usize| unsafe {
                let start = column * self.rows + first;
                out.part(start..start + rows)
            };
            match &self.weights {
                Weights::Panels { place, panel_bytes } => {
                    let start = place.start + index * panel_bytes;
                    let bytes = &store.arena.bytes()[start..start + panel_bytes];
                    let parts = self.columns / PART;
                    let mut results = [[0.0; ROWS]; COLUMNS];
                    for start in (0..count).step_by(COLUMNS) {
                        let group = (count - start).min(COLUMNS);
                        let columns: [Column<'_>; COLUMNS] =
                            std::array::from_fn(|i| x.column((start + i).min(count - 1), self.columns));
                        let columns = &columns[..group];
                        kernel::panel(level, self.kind, bytes, parts, columns, partials, &mut results);
                        for (i, result) in results[..group].iter().enumerate() {
                            target(start + i).copy_from_slice(&result[..rows]);
                        }
                    }
                }
                Weights::Rows(tensor) => {
                    let data = store.file.data(tensor);
                    let row_bytes = data.len() / self.rows;
                    for column in 0..count {
                        let x = &x.values[column * self.columns..(column + 1) * self.columns];
                        for (row, out) in target(column).iter_mut().enumerate() {
                            let bytes = &data[(first + row) * row_bytes..(first + row + 1) * row_bytes];
                            *out = kernel::float_row(level, self.kind, bytes, x);
                        }
                    }
                }
            }
        }
    }
}

/// Multiplies several matrices with the same columns in one go: `out` of each is `count` columns of its rows.
pub fn multiply<const N: usize>(
    store: &Store,
    level: Level,
    pool: &mut Pool,
    scratch: &Disjoint<'_, Box<Partials>>,
    x: &Activations,
    count: usize,
    matrices: [(&Matrix, &mut [f32]); N],
) {
    let matrices = matrices.map(|(matrix, out)| {
        assert!(out.len() >= matrix.rows * count, "room for the product");
        (matrix, Disjoint::new(out))
    });
    let total: usize = matrices.iter().map(|(matrix, _)| matrix.panels()).sum();
    // A few chunks a thread: even loads without much handing out.
    let grain = total.div_ceil(pool.threads() * 4);
    pool.for_each(total, grain, |thread, range| {
        // SAFETY: each thread has its own scratch.
        let partials = &mut unsafe { scratch.part(thread..thread + 1) }[0];
        let mut before = 0;
        for (matrix, out) in &matrices {
            let panels = matrix.panels();
            let start = range.start.clamp(before, before + panels) - before;
            let end = range.end.clamp(before, before + panels) - before;
            if start < end {
                matrix.multiply_panels(store, level, start..end, x, count, partials, out);
            }
            before += panels;
        }
    });
}

/// Columns of activations: floats, and their 8 bit blocks.
pub struct Activations {
    /// Floats, one column after the other.
    pub values: Vec<f32>,
    quants: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<[i32; 2]>,
    totals: Vec<i32>,
}

impl Activations {
    /// Room for `values` floats.
    pub fn new(values: usize) -> Activations {
        Activations {
            values: vec![0.0; values],
            quants: vec![0; values],
            scales: vec![0.0; values / PART],
            sums: vec![[0; 2]; values / PART],
            totals: vec![0; values / PART],
        }
    }

    /// Bytes of room for `values` floats.
    pub fn bytes(values: u64) -> u64 {
        values * 5 + values / PART as u64 * 16
    }

    fn column(&self, index: usize, width: usize) -> Column<'_> {
        let parts = width / PART;
        Column {
            quants: &self.quants[index * width..(index + 1) * width],
            scales: &self.scales[index * parts..(index + 1) * parts],
            sums: &self.sums[index * parts..(index + 1) * parts],
            totals: &self.totals[index * parts..(index + 1) * parts],
        }
    }

    /// Fills `count` columns in parallel: `fill` writes the floats of a column, which are then quantised.
    ///
    /// A width that is not whole parts is not quantised: then only float weights fit it.
    pub fn fill(
        &mut self,
        level: Level,
        pool: &mut Pool,
        count: usize,
        width: usize,
        fill: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        let (values, quants) = (Disjoint::new(&mut self.values), Disjoint::new(&mut self.quants));
        let (scales, sums) = (Disjoint::new(&mut self.scales), Disjoint::new(&mut self.sums));
        let totals = Disjoint::new(&mut self.totals);
        pool.for_each(count, 1, |_, range| {
            for column in range {
                let parts = width / PART;
                let (whole, part) =
                    (column * width..(column + 1) * width, column * parts..(column + 1) * parts);
                // SAFETY: each column is its own part of all five.
                unsafe {
                    let values = values.part(whole.clone());
                    fill(column, values);
                    if width.is_multiple_of(PART) {
                        let (scales, sums) = (scales.part(part.clone()), sums.part(part.clone()));
                        kernel::quantise(level, values, quants.part(whole), scales, sums, totals.part(part));
                    }
                }
            }
        });
    }
}
