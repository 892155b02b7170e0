//! Sums of rows with weights.

use twofour::Arithmetic;
use twofour_cuda::layer::{DeviceBuffer, LayerContext};
use twofour_transformer::cuda::{RowSums, weighted_rows};

use crate::{
    Check, for_each_type,
    reference::{expect_close, numbers, wide},
    unwritten, up,
};

impl Check for RowSums {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let RowSums { tokens, each, rows, width } = *self;
        let x = numbers::<T>(rows * width, 1);
        let weights = numbers::<f32>(tokens * each, 2);
        // The last of each token's is none of the rows.
        let place = |i: usize| if i % each == each - 1 { rows + i } else { (i * 7) % rows };
        let places: Vec<u32> = (0..tokens * each).map(|i| place(i) as u32).collect();
        let (x_there, mut out) = (up(context, &x), unwritten::<T>(context, tokens * width));
        let places_there = DeviceBuffer::from_ids(context, &places).unwrap();
        let weights_there = up(context, &weights);
        let listed = (places_there.as_slice(), weights_there.as_slice());
        weighted_rows(context, *self, x_there.as_slice(), listed, out.as_slice_mut()).unwrap();
        let (x, mut expected) = (wide(&x), vec![0.0; tokens * width]);
        for (i, (place, weight)) in places.iter().zip(&weights).enumerate() {
            let Some(row) = x.get(*place as usize * width..(*place as usize + 1) * width) else { continue };
            let sums = expected[i / each * width..].iter_mut().zip(row);
            sums.for_each(|(sum, x)| *sum += f64::from(*weight) * x);
        }
        expect_close(&format!("{self:?} {:?}", T::DTYPE), &out.to_host::<T>().unwrap(), &expected, tolerance);
    }
}

#[test]
fn sums_of_rows_are_those_of_f64_without_the_rows_that_are_not_there() {
    for (tokens, each, rows, width) in [(1, 1, 1, 1), (1, 3, 5, 2048), (70, 4, 90, 63), (5, 9, 31, 128)] {
        for_each_type(&RowSums { tokens, each, rows, width });
    }
}
