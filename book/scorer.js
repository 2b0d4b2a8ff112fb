// Weights of the search: a name of the library comes before pages that mention it.
var Scorer = {
  objNameMatch: 60,
  objPartialMatch: 20,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
