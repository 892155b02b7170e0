//! Sums in host memory.

use std::sync::Arc;

use super::{GradientReduction, Rank, group::Post};
use crate::{
    Error, Result,
    engine::cpu::{CpuBuffer, CpuEngine},
};

/// Sums in host memory, in the order of ranks: for ranks on the CPU of one machine, each with threads of its own.
#[derive(Debug)]
pub struct HostReduction {
    threads: Arc<rayon::ThreadPool>,
    /// Whether a rank has refused its gradients in this step.
    refused: bool,
}

impl HostReduction {
    /// The reduction of a rank that computes with so many threads.
    ///
    /// # Errors
    /// Threads that the system does not start.
    pub fn new(threads: usize) -> Result<Self> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.map_err(|error| Error::Unsupported {
            engine: "cpu",
            what: format!("{threads} more threads: {error}"),
            remedy: "use fewer ranks or threads",
        })?;
        Ok(HostReduction { threads: Arc::new(pool), refused: false })
    }

    fn exchange(&mut self, rank: &Rank, post: Post) -> Result<Arc<Vec<Post>>> {
        let posts = rank.exchange(post)?;
        self.refused |= posts.contains(&Post::Refused);
        Ok(posts)
    }
}

impl GradientReduction<CpuEngine> for HostReduction {
    fn ready(&mut self, rank: &Rank, mut gradients: Vec<&mut CpuBuffer>) -> Result<()> {
        if self.refused {
            return Ok(());
        }
        let own = gradients.iter().map(|gradient| Ok(gradient.floats()?.to_vec())).collect::<Result<_>>()?;
        let posts = self.exchange(rank, Post::Floats(own))?;
        if self.refused {
            return Ok(());
        }
        for (index, gradient) in gradients.iter_mut().enumerate() {
            let sums = gradient.floats_mut()?;
            sums.fill(0.0);
            for (other, post) in posts.iter().enumerate() {
                let buffer = match post {
                    Post::Floats(buffers) => buffers.get(index),
                    _ => None,
                };
                let Some(values) = buffer.filter(|values| values.len() == sums.len()) else {
                    let reason = "its backward pass completes gradients in another order".to_owned();
                    return Err(Error::Rank { rank: other, reason });
                };
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
        }
        Ok(())
    }

    fn finish(&mut self, rank: &Rank, loss: &mut CpuBuffer) -> Result<()> {
        self.ready(rank, vec![&mut *loss])?;
        if std::mem::take(&mut self.refused) {
            loss.floats_mut()?.fill(f32::NAN);
        }
        Ok(())
    }

    fn refuse(&mut self, rank: &Rank) -> Result<()> {
        if !self.refused {
            self.exchange(rank, Post::Refused)?;
        }
        Ok(())
    }

    fn threads(&self) -> Option<Arc<rayon::ThreadPool>> {
        Some(self.threads.clone())
    }
}
