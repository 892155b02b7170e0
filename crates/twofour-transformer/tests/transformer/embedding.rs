//! Embedding.

use twofour::Arithmetic;
use twofour_cuda::layer::{Accumulate, DeviceBuffer, LayerContext};
use twofour_transformer::cuda::{Embedding, embedding_forward, embedding_gradient};

use crate::{
    Check, for_each_type,
    reference::{expect_close_to, numbers, wide},
    unwritten, up,
};

struct Case(Embedding);

impl Check for Case {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let Embedding { tokens, vocabulary, width, positions } = self.0;
        let what = format!("{:?} {:?}", self.0, T::DTYPE);
        // Most tokens have one of few ids, as in text.
        let id = |t: usize| if t.is_multiple_of(3) { t * 7919 % vocabulary } else { t % 5 % vocabulary };
        let mut ids: Vec<u32> = (0..tokens).map(|t| id(t) as u32).collect();
        let outside = tokens / 2;
        ids[outside] = vocabulary as u32;
        let (table, learned) = (numbers::<T>(vocabulary * width, 1), numbers::<T>(positions * width, 2));
        let dy = numbers::<T>(tokens * width, 3);
        let ids_there = DeviceBuffer::from_ids(context, &ids).unwrap();
        let (table_there, learned_there, dy_there) = (up(context, &table), up(context, &learned), up(context, &dy));
        let mut out = unwritten::<T>(context, tokens * width);
        let mut status = DeviceBuffer::from_ids(context, &[0]).unwrap();
        let tables = (table_there.as_slice(), (positions > 0).then(|| learned_there.as_slice()));
        let (i, o, s) = (ids_there.as_slice(), out.as_slice_mut(), status.as_slice_mut());
        embedding_forward(context, self.0, i, tables, o, s).unwrap();
        assert_eq!(status.ids_to_host().unwrap(), [outside as u32 + 1], "{what}");
        let (wide_table, wide_learned, wide_dy) = (wide(&table), wide(&learned), wide(&dy));
        let mut expected = vec![0.0; tokens * width];
        let (mut dtable, mut dlearned) = (vec![0.0; vocabulary * width], vec![0.0; positions * width]);
        for (t, id) in ids.iter().map(|id| *id as usize).enumerate() {
            for c in 0..width {
                let at = t * width + c;
                if id < vocabulary {
                    expected[at] += wide_table[id * width + c];
                    dtable[id * width + c] += wide_dy[at];
                }
                if positions > 0 {
                    expected[at] += wide_learned[t % positions * width + c];
                    dlearned[t % positions * width + c] += wide_dy[at];
                }
            }
        }
        expect_close_to(&what, &out.to_host::<T>().unwrap(), &expected, tolerance, 1.0);

        let (mut to_table, mut to_learned) =
            (unwritten::<f32>(context, vocabulary * width), unwritten::<f32>(context, positions * width));
        let mut run = |accumulate| {
            let to = (to_table.as_slice_mut(), (positions > 0).then(|| to_learned.as_slice_mut()));
            let (i, dy, s) = (ids_there.as_slice(), dy_there.as_slice(), status.as_slice_mut());
            embedding_gradient(context, self.0, i, dy, to, accumulate, s).unwrap();
            (to_table.to_host::<f32>().unwrap(), to_learned.to_host::<f32>().unwrap())
        };
        let first = run(Accumulate::Overwrite);
        let size = (tokens as f64).sqrt();
        expect_close_to(&format!("{what}: table"), &first.0, &dtable, 2e-6, size);
        expect_close_to(&format!("{what}: positions"), &first.1, &dlearned, 2e-6, size);
        for _ in 0..3 {
            assert!(run(Accumulate::Overwrite) == first, "{what}: another run");
        }
        let twice = run(Accumulate::Add);
        assert!(twice.0.iter().zip(&first.0).all(|(twice, once)| *twice == once + once), "{what}: accumulated");
    }
}

#[test]
fn rows_and_their_gradients_are_those_of_f64_and_repeat() {
    for (tokens, vocabulary, width, positions) in
        [(1, 1, 1, 0), (96, 10, 7, 32), (1000, 256, 96, 250), (6000, 50_257, 64, 0), (4096, 3, 1025, 0)]
    {
        for_each_type(&Case(Embedding { tokens, vocabulary, width, positions }));
    }
}
