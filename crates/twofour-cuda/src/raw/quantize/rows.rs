//! The CTAs that quantize a row: one, or a cluster's where there are fewer rows than SMs.

use crate::{DataType, Device, device::Launch};

/// Most threads of a CTA.
const MAX_THREADS: u32 = 1024;

/// CTAs of a cluster, most first; `headers/quantized_row.cuh` has room for as many.
const CLUSTERS: [u32; 3] = [8, 4, 2];

/// The launch configurations of a kernel on one device whose clusters, of `headers/quantized_row.cuh`, quantize a row
/// each.
#[derive(Debug, Clone, Copy)]
pub struct RowCtas {
    sms: u32,
    has_clusters: bool,
    /// Elements of a vector.
    vector: u32,
    /// Fewest vectors of a CTA of a cluster.
    least: u32,
}

impl RowCtas {
    /// Returns the configurations for rows of a data type. CTAs of a cluster have at least `least` vectors of 16 bytes
    /// each.
    pub fn new(device: &Device, dtype: DataType, least: u32) -> Self {
        let has_clusters = device.architecture().features().cluster >= CLUSTERS[0];
        Self { sms: device.sms(), has_clusters, vector: 16 / dtype.bytes() as u32, least }
    }

    /// Returns the configuration for `rows` rows of `width` elements: a thread for each vector, as far as there are as
    /// many.
    pub fn launch(&self, rows: u32, width: u32) -> Launch {
        let vectors = width.div_ceil(self.vector);
        let is_filled = |ctas: &u32| vectors / ctas >= self.least && rows <= self.sms / ctas;
        let cluster = CLUSTERS.into_iter().find(|ctas| self.has_clusters && is_filled(ctas)).unwrap_or(1);
        let block = vectors.div_ceil(cluster).next_multiple_of(32).clamp(32, MAX_THREADS);
        Launch { grid: (rows * cluster, 1), block, shared: 0, cluster }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_divided_while_sms_are_idle_and_ctas_are_filled() {
        let rows = RowCtas { sms: 132, has_clusters: true, vector: 8, least: 128 };
        let of = |rows: RowCtas, count, width| {
            let Launch { grid, block, cluster, .. } = rows.launch(count, width);
            (grid.0, block, cluster)
        };
        assert_eq!(of(rows, 1, 14_336), (8, 224, 8));
        assert_eq!(of(rows, 16, 14_336), (128, 224, 8));
        assert_eq!(of(rows, 17, 14_336), (68, 448, 4));
        assert_eq!(of(rows, 512, 14_336), (512, 1024, 1));
        assert_eq!(of(rows, 1, 4096), (4, 128, 4));
        assert_eq!(of(rows, 3, 100), (3, 32, 1));
        assert_eq!(of(rows, 3, 0), (3, 32, 1));
        assert_eq!(of(RowCtas { has_clusters: false, ..rows }, 1, 14_336), (1, 1024, 1));
        assert_eq!(of(rows, i32::MAX as u32, 8), (i32::MAX as u32, 32, 1));
    }
}
